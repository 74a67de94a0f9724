"""The picture of the cluster, while Slurm answers and while it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from tests.unit.services.slurm.pictures import sample

from cotenant.services.slurm.cluster_watch import VANISHED, ClusterWatch
from cotenant.services.slurm.commands import SlurmAway, SlurmCommands, run
from cotenant.services.slurm.reader import read
from cotenant.services.slurm.records import Reading, SlurmJob


class Recorded(SlurmCommands):
    """Answers with what was recorded, without the jobs in `gone`; `known` is what `scontrol show job` says."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.gone, self.known = False, set[str](), dict[str, Mapping[str, str]]()

    async def configuration(self) -> Mapping[str, str]:
        return {"SelectTypeParameters": "CR_CORE_MEMORY"}

    async def jobs(self) -> Reading:
        if self.away:
            raise SlurmAway("squeue did not answer within 20 s")
        reading = read(sample("squeue"))
        return replace(reading, jobs=tuple(job for job in reading.jobs if job.id not in self.gone))

    async def nodes(self) -> Reading:
        return read(sample("sinfo"))

    async def job(self, job_id: str) -> Mapping[str, str]:
        return self.known.get(job_id, {})

    async def accounted(self, job_id: str) -> Mapping[str, str]:
        return {}


def test_the_last_picture_stays_while_slurm_is_away() -> None:
    slurm = Recorded()
    watch = ClusterWatch(slurm)
    asyncio.run(watch.read())
    before = watch.picture
    slurm.away = True
    asyncio.run(watch.read())
    assert watch.picture is before
    assert watch.problem == "squeue did not answer within 20 s"
    assert watch.age_seconds(before.taken_seconds + 60) == 60
    slurm.away = False
    asyncio.run(watch.read())
    assert not watch.problem
    assert watch.picture is not before


def test_a_job_that_vanished_is_looked_up() -> None:
    slurm, ended = Recorded(), list[SlurmJob]()
    watch = ClusterWatch(slurm, ended=ended.extend)
    asyncio.run(watch.read())
    ended.clear()
    slurm.gone, slurm.known = {"1", "2"}, {"1": {"JobState": "FAILED", "ExitCode": "3:0"}}
    asyncio.run(watch.read())
    jobs = watch.picture.jobs
    assert (jobs["1"].state, jobs["1"].exit_code) == ("FAILED", 3)
    assert jobs["2"].state == VANISHED
    assert [job.id for job in ended] == ["1"]  # of the other it is not known how it ended


def test_memory_counts_where_slurm_allocates_it() -> None:
    watch = ClusterWatch(Recorded())
    asyncio.run(watch.read())
    assert watch.picture.memory_counts


def test_a_command_that_hangs_is_killed() -> None:
    async def ask() -> str:
        try:
            await run("sleep", "60", timeout_seconds=0.1)
        except SlurmAway as error:
            return str(error)
        return ""

    began = time.monotonic()
    assert asyncio.run(ask()) == "sleep did not answer within 0.1 s"
    assert time.monotonic() - began < 30
