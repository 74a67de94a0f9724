"""Whatever an allocator asks for, a job does not change more often than its interval allows."""

from collections.abc import Mapping, Sequence

import pytest

from cotenant.core.model.job import ReplicaRange
from cotenant.core.model.resources import Resources
from cotenant.core.sizing.elastic import ElasticJob, ask_targets

GPU = Resources(1000)


class Restless:
    """An allocator that asks for another number of replicas in every cycle."""

    resize_interval_seconds = 60.0

    def targets(self, jobs: Sequence[ElasticJob], room: Resources, now: float) -> Mapping[str, int]:
        return {job.job_id: 8 if job.replicas < 8 else 1 for job in jobs}


def job(job_id: str, replicas: int, settled_seconds: float) -> ElasticJob:
    return ElasticJob(job_id, ReplicaRange(1, 8), replicas, GPU, (1.0,) * 8, settled_seconds=settled_seconds)


@pytest.mark.parametrize(
    ("replicas", "settled", "rigid", "becomes"),
    [
        (4, 10.0, [], 4),  # changed lately
        (8, 10.0, [], 8),
        (8, 10.0, [GPU], 1),  # a waiting job needs it
        (4, 60.0, [], 8),
        (8, 60.0, [], 1),
        (4, 10.0, [GPU], 4),  # it does not grow either way
    ],
)
def test_a_job_that_changed_lately_keeps_its_number_unless_jobs_wait(
    replicas: int, settled: float, rigid: list[Resources], becomes: int
) -> None:
    jobs = [job("a", replicas, settled)]
    assert ask_targets(Restless(), jobs, GPU * 8, iter(rigid), 0.0) == {"a": becomes}


def test_a_job_that_changed_lately_gives_up_what_another_grows_into() -> None:
    jobs = [job("a", 8, 10.0), job("b", 1, 100.0)]
    assert ask_targets(Restless(), jobs, GPU * 0, [], 0.0) == {"a": 1, "b": 8}
