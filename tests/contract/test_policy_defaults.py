"""The defaults of every policy's options, as users would write them: changing one is a decision that users notice."""

from __future__ import annotations

import pytest

from cotenant import plugins

OPTIONS = {
    "borda-mlfq": (
        "variant=robust confidence_min=0.5 cadence_seconds=240 gpu_weight=10 replica_weight=5 level_seconds=60 "
        "level_factor=2 hold_levels=1 error=0.25 starvation_seconds=0 quantiles=0.25,0.5 thresholds="
    ),
    "drf": "mode=backfill preemptive=false",
    "edf": "mode=strict",
    "fifo": "mode=strict",
    "gittins": "quantum_gpu_seconds=600 history_min=100 cores_per_gpu=3",
    "las": "thresholds=3250,7200 promote_knob=0 starvation_seconds=0 cores_per_gpu=3",
    "optimus": "interval_seconds=600 unknown=attained quantum_seconds=60",
    "sjf": "mode=strict unknown=last quantum_seconds=60",
    "srsf": "unknown=attained quantum_seconds=60 cores_per_gpu=3",
    "srtf": "unknown=attained quantum_seconds=60",
    "swaf": "lost=tail mode=backfill",
    "aiturbo": (
        "interval_seconds=240 warm_up_seconds=30 measure_seconds=60 gpu_weight=10 task_weight=5 core_weight=1 "
        "step_cores_per_gpu=1 confidence_min=0.5"
    ),
    "coda-adaptive": (
        "warm_up_seconds=30 measure_seconds=60 step_cores_per_gpu=1 tolerance=0.02 noise=0.02 counts_max=8 "
        "vision=6 speech=3 language=2"
    ),
    "marginal-gain": "goal=completions interval_seconds=240 hysteresis=0.2 quantum_seconds=60",
    "role-based": "server_cores=3 worker_cores=4",
    "xiao": "interval_seconds=1200 warm_up_seconds=30 measure_seconds=60 confidence_min=0.5 trials=true",
    "fgd": "workload= weights=alike",
    "locality": (
        "server_seconds=300 rack_seconds=300 dedicated_share=0.5 balance_cores=false gpu_types=false moves_max=2 "
        "settled_seconds=1800 gain_min=2"
    ),
    "multi-array": (
        "large_gpus=4 resize_seconds=14400 warm_up_seconds=300 lend_cores=true lend_gpus=true trial_cores=1 "
        "trial_seconds=900 cpu_wait_seconds=600 guard_seconds=3600"
    ),
    "qos": "interference=philly prefer=packed stretch_max=1.25",
    "history": (
        "kinds_max=10000 samples_max=32 confidence_min=0.5 hint_confidence=0.25 tolerance=0.02 core_counts_min=3"
    ),
    "latency": "services_max=10000 allocations_max=16 batches_max=64",
    "lightgbm-duration": (
        "ends_max=100000 keys_max=30000 train_min=200 train_every=250 train_growth=0.05 confidence_min=0.5"
    ),
    "loss-curve": "jobs_max=10000 rates_max=16 allocations_max=8 confidence_min=0.5 refit_share=0.02",
    "parameter-server": "kinds_max=10000 confidence_min=0.5",
    "scaling": "kinds_max=10000 confidence_min=0.5 others_trust=0.6 cross=ring batch=auto slowdown=1.5",
    "xiao-piecewise": "kinds_max=10000 confidence_min=0.5 others_trust=0.6 noise=0.02 form=0.045",
    "coda-eliminator": (
        "slowdown=0.05 slowdown_fast=0.15 noise=0.05 false_alarms_per_day=0.25 expected_slack=0.15 "
        "bandwidth_percent=75 bandwidth_calm_percent=65 cpu_percent=30 memory_percent=10 io_percent=30 "
        "look_windows=2 calm_seconds=60 calm_seconds_max=960 suspended_seconds_max=300 "
        "suspended_within_seconds=1800 cleared_seconds=300 suspects_together_max=4"
    ),
}
INSTALLED = [plugin for group in plugins.GROUPS for plugin in plugins.discover(group)]


@pytest.mark.parametrize("plugin", INSTALLED, ids=lambda plugin: f"{plugin.group}:{plugin.name}")
def test_the_defaults_of_options_are_those_that_users_know(plugin: plugins.Plugin) -> None:
    written = " ".join(f"{name}={default}" for name, default in plugin.options.items())
    assert written == OPTIONS.get(plugin.name, "")
