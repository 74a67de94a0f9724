"""Overlays: what they draw, that only the seed decides it, and that none affects another."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.model.job import JobKind, Request
from cotenant.core.policy.options import BadOption
from cotenant.simulator import Trace, TraceJob, load, parse_cluster, simulate
from cotenant.simulator.overlays import KINDS, parse_overlays
from cotenant.simulator.overlays.cpu_jobs import sample
from cotenant.simulator.overlays.models import MURI, SYNERGY
from cotenant.simulator.traces import workers
from cotenant.simulator.traces.trace_job import Ended, replicas

CLUSTER = parse_cluster("2x8x96")
SAMPLE = load("sample")
MANY = Trace(
    "made up", "none", tuple(TraceJob(str(n), n * 60.0, 60.0 + n % 300, workers(1 + n % 4)) for n in range(6000))
)
ALL = (
    "gpu-type=V100,models=gavel,fractions=openb,cores=4,cpu-jobs=openb,"
    "tenants=8,priorities=3,deadlines=2,outcomes=philly"
)


def laid(text: str, trace: Trace = MANY) -> tuple[TraceJob, ...]:
    return parse_overlays([text]).apply(trace, CLUSTER).jobs


def test_without_overlays_nothing_is_added() -> None:
    trace = parse_overlays([]).apply(SAMPLE, CLUSTER)
    assert trace is SAMPLE
    assert trace.overlay == {}


def test_an_applied_overlay_is_not_applied_again() -> None:
    overlays = parse_overlays(["cpu-jobs=openb,tenants=3"])
    once = overlays.apply(SAMPLE, CLUSTER)
    assert overlays.apply(once, CLUSTER) is once
    assert once.overlay == {"cpu-jobs": "openb", "tenants": "3", "seed": "0"}


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_in_which_keys_are_written_changes_nothing(order: int) -> None:
    assert laid(",".join(ALL.split(",")[::order])) == laid(ALL)


FIELDS: dict[str, Callable[[TraceJob], object]] = {
    "gpu-type": lambda job: job.gpu_type,
    "models": lambda job: job.model,
    "fractions": lambda job: job.roles[0].request.gpu_milli,
    "cores": lambda job: job.roles[0].request.cores,
    "tenants": lambda job: job.tenant,
    "priorities": lambda job: job.priority,
    "deadlines": lambda job: job.deadline_seconds,
    "outcomes": lambda job: job.ended,
}


@settings(max_examples=examples(12), deadline=None)
@given(st.sets(st.sampled_from(ALL.split(","))), st.sampled_from(ALL.split(",")), st.integers(0, 2**40))
def test_what_a_key_draws_for_a_trace_s_jobs_is_the_same_whatever_other_keys_there_are(
    others: set[str], one: str, seed: int
) -> None:
    key = one.partition("=")[0]
    alone = {job.id: job for job in laid(f"{one},seed={seed}", SAMPLE)}
    among = {job.id: job for job in laid(",".join([*others - {one}, one, f"seed={seed}"]), SAMPLE)}
    if key == "cpu-jobs":
        assert set(alone) == set(among)
    elif key == "cores" and "fractions=openb" in others:
        return  # the cores follow the share
    else:
        tell = FIELDS[key]
        assert [tell(alone[job.id]) for job in SAMPLE.jobs] == [tell(among[job.id]) for job in SAMPLE.jobs]


SCRIPT = f"""
import hashlib
from cotenant.simulator import load, parse_cluster
from cotenant.simulator.overlays import parse_overlays
jobs = parse_overlays(["{ALL},seed=7"]).apply(load("sample"), parse_cluster("2x8x96")).jobs
print(hashlib.sha256(repr(jobs).encode()).hexdigest())
"""


def test_the_same_seed_gives_the_same_jobs_in_every_process() -> None:
    here = hashlib.sha256(repr(laid(f"{ALL},seed=7", SAMPLE)).encode()).hexdigest()
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == here


def test_the_drawn_jobs_are_those_that_were_drawn_before() -> None:
    """Published figures must be reproduced by the next release too."""
    jobs = laid(f"{ALL},seed=7", SAMPLE)
    first = next(job for job in jobs if job.id == SAMPLE.jobs[3].id)
    told = first.model, first.tenant, first.priority, first.ended, first.deadline_seconds
    assert told == ("LM (batch size 5)", "tenant-3", 0, Ended.PASSED, 588102.43380656)
    added = [job for job in jobs if job.kind is JobKind.CPU]
    assert (len(added), added[0].submitted_seconds, added[0].tenant) == (3139, 846.794095, "tenant-7")


def test_another_seed_gives_other_jobs() -> None:
    assert laid("models=synergy,seed=1") != laid("models=synergy,seed=2")


def test_models_come_in_their_published_shares() -> None:
    counts = Counter(job.model for job in laid("models=synergy"))
    assert {model: round(count / len(MANY) * 100) for model, count in counts.items()} == pytest.approx(SYNERGY, abs=2)
    counts = Counter(job.model for job in laid("models=muri"))
    assert set(counts) == set(MURI)
    assert min(counts.values()) > len(MANY) / 8 * 0.85


def test_a_gang_trains_a_model_of_gavel_s_that_was_measured_on_several_gpus() -> None:
    for job in laid("models=gavel"):
        assert job.roles[0].replicas == 1 or not job.model.startswith(("A3C", "CycleGAN", "Recommendation"))


def test_cores_are_set_as_users_would_request_them() -> None:
    assert {job.roles[0].request.cores for job in laid("cores=auto")} == {None}
    assert {job.roles[0].request.cores for job in laid("cores=5")} == {5}
    assert {job.roles[0].request.cores for job in laid("cores=proportional")} == {12}
    shared = Trace("made up", "none", (TraceJob("a", 0, 1, replicas(1, Request(gpu_milli=300))),))
    assert laid("cores=4", shared)[0].roles[0].request.cores == 2


def test_cpu_jobs_request_their_share_of_the_clusters_core_time() -> None:
    jobs = [job for job in laid("cpu-jobs=openb:0.5") if job.kind is JobKind.CPU]
    span = MANY.jobs[-1].submitted_seconds
    asked = sum((job.roles[0].request.cores or 0) * job.work_seconds for job in jobs)
    assert asked == pytest.approx(0.5 * CLUSTER.cores * span, rel=0.2)
    assert all(0 <= job.submitted_seconds <= span for job in jobs)
    assert all(job.roles[0].request.memory_bytes == 0 for job in jobs)  # which the cluster does not declare
    assert len({job.id for job in jobs}) == len(jobs)
    by_core = Counter(job.memory_bandwidth_bytes_per_second / (job.roles[0].request.cores or 1) for job in jobs)
    assert [by_core[rate] / len(jobs) for rate in (0.5e9, 2e9, 6e9)] == pytest.approx([0.6, 0.3, 0.1], abs=0.06)


def test_cpu_jobs_come_for_as_long_as_the_work_of_a_trace_takes_that_comes_at_once() -> None:
    at_once = Trace("made up", "none", tuple(TraceJob(str(n), 0, 1e5, workers(8)) for n in range(20)))
    span = 20 * 8 * 1e5 / CLUSTER.gpus
    jobs = [job for job in laid("cpu-jobs=openb:0.5", at_once) if job.kind is JobKind.CPU]
    assert 0.9 * span < max(job.submitted_seconds for job in jobs) <= span
    asked = sum((job.roles[0].request.cores or 0) * job.work_seconds for job in jobs)
    assert asked == pytest.approx(0.5 * CLUSTER.cores * span, rel=0.2)


def test_no_cpu_job_is_drawn_that_fits_no_node() -> None:
    small = parse_overlays(["cpu-jobs=openb"]).apply(MANY, parse_cluster("8x2x16"))
    cores = {job.roles[0].request.cores for job in small.jobs if job.kind is JobKind.CPU}
    assert max(core or 0 for core in cores) == 16
    assert max(pod.cores for pod in sample()) > 16


def test_cpu_jobs_get_ids_that_no_job_of_the_trace_has() -> None:
    trace = replace(SAMPLE, jobs=(replace(SAMPLE.jobs[0], id="openb-cpu-1"), *SAMPLE.jobs[1:]))
    ids = [job.id for job in laid("cpu-jobs=openb", trace)]
    assert len(set(ids)) == len(ids)


def test_tenants_share_the_jobs_as_zipf_has_it() -> None:
    counts = Counter(job.tenant for job in laid("tenants=4"))
    whole = 1 + 1 / 2 + 1 / 3 + 1 / 4
    shares = [counts[f"tenant-{k}"] / len(MANY) for k in (1, 2, 3, 4)]
    assert shares == pytest.approx([1 / k / whole for k in (1, 2, 3, 4)], abs=0.02)


def test_deadlines_leave_the_configured_slack_on_average() -> None:
    factors = [(job.deadline_seconds or 0) - job.submitted_seconds for job in laid("deadlines=3")]
    factors = [slack / job.work_seconds for slack, job in zip(factors, MANY.jobs, strict=True)]
    assert min(factors) >= 2
    assert max(factors) < 4
    assert sum(factors) / len(factors) == pytest.approx(3, abs=0.02)


def test_outcomes_have_philly_s_shares_of_jobs_and_of_gpu_time() -> None:
    skewed = replace(
        MANY, jobs=tuple(replace(job, work_seconds=10.0 + (n % 100) ** 12) for n, job in enumerate(MANY.jobs))
    )
    jobs = laid("outcomes=philly", skewed)
    counts = Counter(job.ended for job in jobs)
    assert [counts[ended] / len(jobs) for ended in Ended] == pytest.approx([0.693, 0.135, 0.172], abs=0.015)
    time = {
        ended: sum(job.roles[0].replicas * job.work_seconds for job in jobs if job.ended is ended) for ended in Ended
    }
    shares = [seconds / sum(time.values()) for seconds in time.values()]
    assert shares == pytest.approx([0.4453, 0.3769, 0.1776], abs=0.03)


def test_priorities_halve_from_level_to_level() -> None:
    counts = Counter(job.priority for job in laid("priorities=3"))
    assert [counts[level] / len(MANY) for level in range(3)] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.02)


def test_fractions_follow_openb_and_whole_makes_whole_gpus() -> None:
    shared = laid("fractions=openb")
    ones = [job.roles[0].request.gpu_milli for job in shared if job.roles[0].replicas == 1]
    assert sum(milli == 1000 for milli in ones) / len(ones) == pytest.approx(3911 / 6942, abs=0.03)
    assert {job.roles[0].request.gpu_milli for job in shared if job.roles[0].replicas > 1} == {1000}
    again = laid("fractions=whole", replace(MANY, jobs=shared))
    assert {job.roles[0].request.gpu_milli for job in again} == {1000}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model=synergy", "overlay model: unknown overlay; did you mean models?"),
        ("models", "overlay models: must be written key=value"),
        ("models=", "overlay models=: must be written key=value"),
        ("", "overlay nothing: must be written key=value"),
        ("models=resnet", "overlay models: must be one of synergy, gavel, muri, not 'resnet'"),
        ("tenants=0", "overlay tenants: must be an integer from 1 to 100000, not '0'"),
        ("tenants=3,tenants=4", "overlay tenants: was given more than once"),
        ("deadlines=1", "overlay deadlines: must be a number above 1"),
        ("deadlines=nan", "overlay deadlines: must be a number above 1"),
        ("cores=0", "overlay cores: must be auto, proportional or an integer from 1 to 10000, not '0'"),
        ("cpu-jobs=azure", "overlay cpu-jobs: must be one of openb, not 'azure'"),
        ("cpu-jobs=openb:-1", "overlay cpu-jobs: must be a number above 0 and at most 10, not '-1'"),
        ("outcomes=itp", "overlay outcomes: must be one of philly"),
        ("priorities=1", "overlay priorities: must be an integer from 2 to 50"),
        ("fractions=half", "overlay fractions: must be one of whole, openb"),
        ("gpu-type=a/b", "overlay gpu-type: must be printable and without slashes"),
        ("seed=-1", "overlay seed: must be an integer from 0 on, not '-1'"),
        ("tenants=x,seed=y,bad=1", "overlay bad: unknown overlay"),
    ],
)
def test_the_error_for_an_invalid_overlay_lists_the_valid_ones(text: str, told: str) -> None:
    with pytest.raises(BadOption, match=re.escape(told)) as failure:
        parse_overlays([text])
    assert set(failure.value.allowed) == {*KINDS, "seed"}


def test_an_overlay_that_does_not_match_the_cluster_is_reported() -> None:
    with pytest.raises(
        BadOption, match="no node of the cluster 4x8x4 has room for any of openb's CPU jobs: at least 8 cores"
    ):
        parse_overlays(["cpu-jobs=openb"]).apply(SAMPLE, parse_cluster("4x8x4"))
    with pytest.raises(BadOption, match="the cluster 4x0x4 has no core for each GPU"):
        parse_overlays(["cores=proportional"]).apply(SAMPLE, parse_cluster("4x0x4"))


def test_a_result_contains_its_overlay() -> None:
    result = simulate("sample", "2x8x96", overlay="cpu-jobs=openb:0.01,seed=5")
    assert result.as_json()["overlay"] == {"cpu-jobs": "openb:0.01", "seed": "5"}
    assert result.jobs > 260
    assert result.cpu_jobs_avg_queue_seconds is not None
    assert simulate("sample", "2x8").as_json()["overlay"] == {}
