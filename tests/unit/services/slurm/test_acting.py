"""What the bridge changes in Slurm: what it does when it may not, when jobs vanish, and while Slurm is away."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.services.slurm.pictures import NOW, picture

from cotenant import plugins
from cotenant.core.model.estimate import Estimate
from cotenant.services.slurm.acting import UPDATES_MAX, ActConfig, Acting
from cotenant.services.slurm.cluster_watch import ClusterWatch
from cotenant.services.slurm.commands import SlurmAway, SlurmCommands, SlurmRefused
from cotenant.services.slurm.records import Picture, SlurmJob, SlurmNode
from cotenant.services.slurm.start_times import StartTimes

NODE = SlurmNode("n1", cores=16, gpus=4, partitions=frozenset({"main"}))
PENDING = SlurmJob("1", 1, gpus_total=1, cpus=1, priority=1, reason="Resources", submitted_seconds=NOW - 60)
GOOD = {"JobSubmitPlugins": "lua", "PriorityType": "priority/multifactor"}


class FakeSlurm(SlurmCommands):
    """Keeps SiteFactors; refuses those of some jobs, with a message."""

    def __init__(self, configuration: Mapping[str, str] = GOOD) -> None:
        super().__init__()
        self.factors, self.refused = dict[str, int](), dict[str, str]()
        self.calls, self.away, self.given = 0, False, configuration

    async def configuration(self) -> Mapping[str, str]:
        return self.given

    async def partitions(self) -> str:
        return "PartitionName=main JobDefaults=DefCpuPerGPU=2 State=UP\n"

    async def site_factors(self) -> Mapping[str, int]:
        if self.away:
            raise SlurmAway("sprio failed: cannot contact slurmctld")
        return self.factors

    async def set_site_factor(self, job_id: str, factor: int, timeout_seconds: float = 5.0) -> None:
        self.calls += 1
        if job_id in self.refused:
            raise SlurmRefused(self.refused[job_id])
        self.factors[job_id] = factor


@dataclass
class FakeStartTimes:
    """Expects each job to take as many seconds as its number."""

    watch: ClusterWatch
    estimates: dict[str, Estimate] = field(default_factory=dict)

    async def answers(self) -> Any:
        """Return a scene."""
        jobs = self.watch.picture.jobs.values()
        self.estimates = {job.id: Estimate(predictable=True, remaining_seconds=job.number) for job in jobs}
        return replace(_Answers(), scene=self)


@dataclass(frozen=True)
class _Answers:
    scene: Any = None


def acting(config: ActConfig, slurm: SlurmCommands, shown: Picture) -> Acting:
    """Return acts on a cluster that was read."""
    watch = ClusterWatch(slurm)
    watch.picture, watch.problem = shown, ""
    policies = plugins.load("cotenant.queue_policies", "srsf"), plugins.load("cotenant.placement_policies", "fgd")
    return Acting(config, slurm, watch, cast("StartTimes", FakeStartTimes(watch)), policies)


def pending(count: int) -> Picture:
    """Return a cluster with jobs that wait."""
    return picture([NODE], *(replace(PENDING, id=str(n), number=n) for n in range(1, count + 1)))


ORDER = ActConfig(frozenset({"order"}))


def test_only_some_factors_are_set_after_each_reading() -> None:
    slurm = FakeSlurm()
    act = acting(ORDER, slurm, pending(60))
    asyncio.run(act.renew())
    assert [*slurm.factors] == [str(n) for n in range(1, UPDATES_MAX + 1)]
    for _ in range(3):
        asyncio.run(act.renew())
    assert sorted(slurm.factors, key=lambda job: -slurm.factors[job]) == [str(n) for n in range(1, 61)]
    calls = slurm.calls
    asyncio.run(act.renew())
    assert slurm.calls == calls


def test_a_job_that_vanished_holds_up_no_other() -> None:
    slurm = FakeSlurm()
    slurm.refused = {"1": "job 1: scontrol failed: Job has already finished for job 1"}
    act = acting(ORDER, slurm, pending(3))
    asyncio.run(act.renew())
    assert slurm.factors.keys() == {"2", "3"}
    assert act.problems() == []


def test_who_may_not_set_factors_is_told_and_stops_at_once() -> None:
    slurm = FakeSlurm()
    slurm.refused = dict.fromkeys(("1", "2", "3"), "job 1: scontrol failed: Access/permission denied for job 1")
    act = acting(ORDER, slurm, pending(3))
    asyncio.run(act.renew())
    assert slurm.calls == 1
    (problem,) = act.problems()
    assert "permission denied" in problem.reason
    assert problem.remedy == "run the bridge as SlurmUser or as an operator of Slurm"
    slurm.refused = {}
    asyncio.run(act.renew())
    assert act.problems() == []


def test_nothing_is_changed_while_slurm_is_away() -> None:
    slurm = FakeSlurm()
    act = acting(ORDER, slurm, pending(3))
    slurm.away = True
    asyncio.run(act.renew())
    slurm.away = False
    act._watch.problem = "squeue did not answer within 20 s"
    asyncio.run(act.renew())
    assert slurm.calls == 0


def test_nothing_is_changed_without_a_switch(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    act = acting(ActConfig(table=tmp_path / "table", history=tmp_path / "runs"), slurm, pending(3))
    asyncio.run(act.renew())
    asyncio.run(act.close())
    assert slurm.calls == 0
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("act", "configuration", "words"),
    [
        ("cores", {"JobSubmitPlugins": "(null)"}, "no lua plug-in"),
        ("order", {"PriorityType": "priority/basic"}, "have no factors"),
    ],
)
def test_an_act_without_effect_is_told(act: str, configuration: Mapping[str, str], words: str, tmp_path: Path) -> None:
    config = ActConfig(frozenset({act}), table=tmp_path / "table", history=tmp_path / "runs")
    found = acting(config, FakeSlurm({**GOOD, **configuration}), pending(1))
    asyncio.run(found.renew())
    (problem,) = found.problems()
    assert words in problem.reason
    fine = acting(config, FakeSlurm(), pending(1))
    asyncio.run(fine.renew())
    assert fine.problems() == []


def completed(number: int) -> SlurmJob:
    """Return a job that took 100 seconds on one core."""
    return SlurmJob(
        *(str(number), number, "COMPLETED"),
        name="train",
        user_id=7,
        partitions=("main",),
        gpus_total=1,
        cpus=1,
        started_seconds=NOW,
        ended_seconds=NOW + 100,
    )


def test_the_table_is_written_kept_and_withdrawn(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    config = ActConfig(frozenset({"cores"}), table=folder / "table", history=tmp_path / "runs")
    act = acting(config, FakeSlurm(GOOD | {"DefMemPerCPU": "2000"}), pending(0))
    act.ended([completed(1), completed(2)], act._watch.picture)
    asyncio.run(act.renew())
    (problem,) = act.problems()
    assert problem.reason == f"cannot write {folder / 'table'}: no such file or directory"
    folder.mkdir()
    asyncio.run(act.renew())
    assert act.problems() == []
    header, row, end, last = config.table.read_text().split("\n")
    assert header.split("\t")[4:] == ["0", "1", "0"]  # memory follows CPUs
    assert row.split("\t")[:7] == ["7", "main", "1", "train", "2", "2", "150"]
    assert (end, last) == ("end", "")
    assert stat.S_IMODE(config.table.stat().st_mode) == 0o644
    again = acting(config, FakeSlurm(), pending(0))
    asyncio.run(again.renew())
    assert again.cores
    assert act.cores
    assert again.cores.choices == act.cores.choices
    asyncio.run(again.close())
    assert [*folder.iterdir()] == []


def test_a_kind_on_new_cores_is_ordered_by_its_earlier_runs(tmp_path: Path) -> None:
    config = ActConfig(frozenset({"cores", "order"}), table=tmp_path / "table", history=tmp_path / "runs")
    train: dict[str, Any] = {"name": "train", "user_id": 7, "partitions": ("main",)}
    waiting = picture(
        [NODE],
        replace(PENDING, id="60", number=60),  # expected to take as many seconds
        replace(PENDING, id="900", number=900, cpus=2, **train),  # likewise, but 100 on one core
        replace(PENDING, id="120", number=120),
    )
    slurm = FakeSlurm()
    act = acting(config, slurm, waiting)
    act.ended([completed(1)], waiting)
    asyncio.run(act.renew())
    assert sorted(slurm.factors, key=lambda job: -slurm.factors[job]) == ["60", "900", "120"]


def test_a_damaged_history_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("{")
    config = ActConfig(frozenset({"cores"}), table=tmp_path / "table", history=tmp_path / "runs")
    asyncio.run(acting(config, FakeSlurm(), pending(0)).renew())
    assert config.table.read_text().endswith("\nend\n")


def test_a_refusal_is_told_from_a_slurm_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "scontrol failed: Invalid job id specified"

    async def fail(*command: str, timeout_seconds: float = 0.0) -> bytes:
        raise SlurmAway(said)

    monkeypatch.setattr("cotenant.services.slurm.commands.run", fail)
    with pytest.raises(SlurmRefused, match="job 17: scontrol failed: Invalid"):
        asyncio.run(SlurmCommands().set_site_factor("17", 5))
    said = "scontrol failed: Unable to contact slurm controller (connect failure)"
    with pytest.raises(SlurmAway, match="contact"):
        asyncio.run(SlurmCommands().set_site_factor("17", 5))
