"""Why Slurm's jobs wait, and when they start."""

from __future__ import annotations

import numpy as np
from tests.unit.services.slurm.pictures import NOW, picture, recorded

from cotenant import plugins
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.refusal import Code
from cotenant.services.slurm.placement_view import gang_of, ledger_of, ruled_out, spec_of
from cotenant.services.slurm.planning import expected_of, forecast_starts, place_hypothetical, refusals, scene_of
from cotenant.services.slurm.records import Placed, SlurmJob, SlurmNode

POLICY = plugins.load("cotenant.placement_policies", "consolidate")
NODES = [
    SlurmNode("n1", cores=8, gpus=2, features=frozenset({"fast"}), partitions=frozenset({"main"})),
    SlurmNode("n2", cores=8, gpus=2, partitions=frozenset({"main", "debug"})),
    SlurmNode("n3", cores=8, partitions=frozenset({"main"}), states=frozenset({"DOWN"}), reason="broken fan"),
]


def running(job_id: str, node: str, cores: int, limit: float | None = None, ran: float = 100) -> SlurmJob:
    """Return a job that runs on some cores of one node."""
    placed = (Placed(node, tuple(range(cores))),)
    return SlurmJob(
        job_id,
        int(job_id),
        "RUNNING",
        cpus=cores,
        started_seconds=NOW - ran,
        submitted_seconds=NOW - ran,
        placed=placed,
        time_limit_seconds=limit,
        partitions=("main",),
    )


def waiting(job_id: str, cores: int = 1, **fields: object) -> SlurmJob:
    """Return a job that waits for its places."""
    given: dict[str, object] = {"cpus": cores, "priority": 10, "partitions": ("main",), "submitted_seconds": NOW - 50}
    return SlurmJob(job_id, int(job_id), **{**given, **fields})  # type: ignore[arg-type]  # fields of a job


def reasons(*jobs: SlurmJob) -> dict[str, str]:
    """Return the code and detail for each waiting job."""
    scene = scene_of(picture(NODES, *jobs), NOW, {})
    found = refusals(scene, POLICY, np.random.default_rng(0))
    return {job_id: f"{refusal.code}: {refusal.detail}" for job_id, refusal in found.items()}


def test_every_waiting_job_of_a_recorded_cluster_has_a_reason() -> None:
    scene = scene_of(recorded(), NOW, {})
    found = refusals(scene, POLICY, np.random.default_rng(0))
    assert {job.id for job in scene.waiting} == found.keys()
    assert found["3"].code is Code.SUSPENDED
    assert found["4"].code is Code.CAPACITY
    assert found["5"].code is Code.DEPENDENCY
    assert found["6_2"].code is Code.ARRAY_LIMIT
    assert found["11"].code is Code.BEGIN_TIME


def test_what_a_recorded_cluster_has_in_use_is_what_slurm_says() -> None:
    ledger, held = ledger_of(recorded())
    assert (ledger.total_cores - ledger.free_cores).tolist() == [6, 4, 16]  # of 6_1, which the sample lacks, none
    assert (ledger.total_gpus - ledger.free_gpus).tolist() == [3, 2, 0]
    assert sorted(held) == ["1", "2", "6_0"]


def test_a_feature_rules_nodes_out() -> None:
    found = reasons(running("1", "n1", 8), waiting("2", features="fast"))
    assert found["2"].startswith("CAPACITY")
    assert "counting only n1" in found["2"]


def test_a_constraint_that_no_node_meets_never_fits() -> None:
    assert "no node meets its constraints" in reasons(waiting("2", features="slow"))["2"]


def test_each_node_that_is_ruled_out_is_named_with_the_reason() -> None:
    job = waiting("2", 4, partitions=("main",), excluded_nodes=("n2",))
    cluster = picture(NODES, running("1", "n1", 6), job)
    ledger, _ = ledger_of(cluster)
    assert ruled_out(job, spec_of(job, cluster), cluster, ledger) == {
        "n1": "2 of 8 cores free, 4 needed",
        "n2": "is excluded by the job",
        "n3": "is down: broken fan",
    }


def test_a_start_is_forecast_within_time_limits() -> None:
    cluster = picture(NODES, running("1", "n1", 8, 1000), running("2", "n2", 8, 400), waiting("3", 8))
    scene = scene_of(cluster, NOW, {"2": Estimate(predictable=True, remaining_seconds=250)})
    found = forecast_starts(scene, POLICY, np.random.default_rng(0), ["3"], lambda: False, draws=0)
    assert found.expected["3"].seconds == 250
    assert found.expected["3"].ends == ("2",)


def test_a_prediction_beyond_the_time_limit_is_cut() -> None:
    job = running("1", "n1", 8, 1000, ran=900)
    assert expected_of(job, Estimate(predictable=True, remaining_seconds=500), NOW).remaining_seconds == 100


def test_a_later_job_does_not_delay_the_first_that_waits() -> None:
    first = waiting("2", 16, priority=20, processes=2, nodes_min=2)
    found = reasons(running("1", "n1", 8, 1000), first, waiting("3", 4, time_limit_seconds=100_000.0))
    assert found["3"].startswith("RESERVED")
    assert reasons(running("1", "n1", 8, 1000), first, waiting("3", 4, time_limit_seconds=60.0))["3"].startswith(
        "NOT_YET_CONSIDERED: it has room"
    )


def test_a_hypothetical_job_comes_behind_those_with_a_higher_priority() -> None:
    cluster = picture(NODES, running("1", "n1", 8, 1000), waiting("2", 8))
    scene = scene_of(cluster, NOW, {})
    job = waiting("9", 8, priority=5)
    gang = gang_of(job, spec_of(job, cluster), cluster, NOW)
    answer, position = place_hypothetical(scene, gang, job, POLICY, np.random.default_rng(0))
    assert position == 2
    assert getattr(answer, "code", None) is Code.CAPACITY
    first = waiting("9", 8, priority=50)
    answer, position = place_hypothetical(scene, gang, first, POLICY, np.random.default_rng(0))
    assert position == 1
    assert getattr(answer, "code", None) is None


def test_nodes_that_a_job_asks_for_are_different_ones() -> None:
    job = waiting("2", 2, nodes_min=2, processes=2)
    spec = spec_of(job, picture(NODES, job))
    assert (spec.replicas, spec.spread.least, spec.roles[0].request.cores) == (2, 2, 1)


def test_a_suspended_job_keeps_its_gpus_and_gives_its_cores_back() -> None:
    job = SlurmJob("1", 1, "SUSPENDED", cpus=4, gpus_total=1, placed=(Placed("n1", (0, 1, 2, 3), (0,)),))
    ledger, _ = ledger_of(picture(NODES, job))
    assert (int(ledger.free_cores[0]), int(ledger.free_gpus[0])) == (8, 1)
