"""What is not given is nothing: 0, no, empty or None. The few other defaults, which users see, are named here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import ModuleType

import pytest

from cotenant.core.failures import classifier, launch_health, retry
from cotenant.core.model import (
    allocation,
    dependencies,
    estimate,
    gang,
    health,
    health_rules,
    job,
    job_array,
    job_fields,
    job_table,
    node,
    refusal,
    tenancy,
    throttle,
)
from cotenant.core.model.resources import NOTHING
from cotenant.core.policy import cluster_view, protocols
from cotenant.core.prediction import core_curve, drift
from cotenant.core.scheduling import admission
from cotenant.core.sizing import core_search

EXPECTED: dict[ModuleType, dict[str, object]] = {
    allocation: {"GpuShare.milli": 1000},
    admission: {
        "Rules.preemption": "policy",
        "Rules.reclaim": True,
        "Rules.reservations": 1,
        "Rules.fair_share": "off",
    },
    classifier: {"Failure.failure_class": "unclassified", "Failure.blame": "unknown"},
    cluster_view: {"RunningJob.preemptible": True},
    core_curve: {
        "Point.windows": 1,
        "Beliefs.noise": 0.02,
        "Beliefs.form": 0.045,
        "Beliefs.bend": 1.5,
        "Beliefs.jump": 0.15,
        "Beliefs.knee": 1.25,
        "Beliefs.flat": 0.1,
    },
    core_search: {
        "SearchOptions.tolerance": 0.02,
        "SearchOptions.noise": 0.02,
        "SearchOptions.step": 1,
        "SearchOptions.counts_max": 8,
    },
    dependencies: {"Dependency.condition": "after_ok"},
    drift: {"Bounds.deviation": 0.15, "Bounds.windows": 3},
    estimate: {"Candidate.nodes": 1},
    gang: {"Gang.kind": "training"},
    health: {"NodeReading.cpus": 1},
    health_rules: {"Rule.recovery": "calm", "Rule.source": "ours"},
    job: {
        "OpenReplicas.least": 1,
        "OpenReplicas.most": 64,
        "Role.name": "worker",
        "Role.replicas": 1,
        "JobSpec.kind": "training",
        "JobSpec.tenant": "default",
        "JobSpec.queue": "default",
        "JobSpec.preemptible": True,
        "JobSpec.grace_seconds": 30.0,
        "JobSpec.warning_signal": "SIGTERM",
        "JobSpec.profiled": True,
    },
    job_array: {"IndexRange.step": 1},
    job_fields: {"JobField.shown_as": "{}"},
    job_table: {
        "JobRow.replicas": 1,
        "JobRow.tenant_weight": 1.0,
        "JobRow.deadline_seconds": math.inf,
        "JobRow.preemptible": True,
        "JobRow.code": -1,
    },
    launch_health: {
        "HoldRules.failures": 3,
        "HoldRules.window_seconds": 300.0,
        "HoldRules.canary_seconds": 10.0,
        "HoldRules.canary_seconds_max": 600.0,
        "HoldRules.quick_seconds": 10.0,
        "HoldRules.quick_jobs": 3,
        "HoldRules.quick_tenants": 2,
        "Outcomes.window_seconds": 300.0,
    },
    node: {"Gpu.numa_node": -1, "NodeShape.count": 1, "NodeShape.containers": True, "NodeShape.container_gpus": True},
    protocols: {"Order.valid_seconds": math.inf, "AttemptWindow.tasks": 1, "AttemptWindow.steady": True},
    refusal: {"Refusal.holds_seconds": math.inf, "Refusal.held_seconds": math.inf},
    retry: {
        "RetryRules.back_off_seconds": 10.0,
        "RetryRules.back_off_seconds_max": 600.0,
        "RetryRules.infrastructure_retries": 3,
        "RetryRules.avoid_seconds": 3600.0,
        "RetryRules.untold_back_off_seconds": 1.0,
        "RetryRules.untold_back_off_seconds_max": 300.0,
    },
    tenancy: {"Tenant.weight": 1.0},
    throttle: {"Throttle.bandwidth_percent": 100},
}


def given_defaults(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the defaults of a module's dataclasses that are something, except values whose own fields are checked."""
    for name, kind in vars(module).items():
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__):
            continue
        for field in dataclasses.fields(kind):
            default = field.default
            if default in (dataclasses.MISSING, NOTHING) or not default or dataclasses.is_dataclass(default):
                continue
            yield f"{name}.{field.name}", default


@pytest.mark.parametrize("module", EXPECTED, ids=lambda module: module.__name__.removeprefix("cotenant.core."))
def test_what_is_not_given_is_nothing_but_for_named_defaults(module: ModuleType) -> None:
    assert dict(given_defaults(module)) == EXPECTED[module]
