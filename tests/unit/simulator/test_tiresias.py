"""The differences between `las` and Tiresias' own simulator: both from one naive replay, one rule at a time.

Tiresias keeps each queue as a list. A job that falls goes to the end of the next list, behind the jobs waiting there;
after each round waiting jobs go behind running jobs, in their order. And it checks too late for a fall, because it uses
the seconds of a run as its GPU-seconds: (limit - seconds) / GPUs from now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from tests.unit.simulator.test_expected import BENCH, WANTED, expected

from cotenant.simulator import Trace, load, simulate

LIMITS = (3250, 7200)
DLAS = "DLAS-gpu 3 queues [3250,7200] GPU-s,"


@dataclass(eq=False)
class Job:
    number: int
    came: float
    seconds: float
    gpus: int
    done: float = 0.0
    runs: bool = False
    queue: int = 0


@dataclass
class Replay:
    """All jobs in queues; `own_lists` and `own_jumps` are Tiresias' rules, otherwise those of `las`."""

    trace: Trace
    gpus: int
    own_lists: bool
    own_jumps: bool
    floor: bool = False  # division as in Python 2
    now: float = 0.0
    jump: float = math.inf
    stops: int = 0
    jct: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        coming = [
            Job(number, job.submitted_seconds, job.work_seconds, job.roles[0].replicas)
            for number, job in enumerate(self.trace.jobs)
        ]
        self.queues: list[list[Job]] = [[] for _ in range(len(LIMITS) + 1)]
        while coming or any(self.queues):
            moments = [job.came for job in coming[:1]] + [self.jump]
            self._pass(min(moments + [self.now + job.seconds - job.done for job in self._running()]))
            while coming and coming[0].came <= self.now:
                self.queues[0].append(coming.pop(0))
            self._demote()
            self._choose()
            self.jump = min(map(self._jump, self._running()), default=math.inf)

    def _running(self) -> list[Job]:
        return [job for queue in self.queues for job in queue if job.runs]

    def _pass(self, until: float) -> None:
        for job in self._running():
            job.done += until - self.now
            if job.done >= job.seconds:
                self.queues[job.queue].remove(job)
                self.jct[job.number] = until - job.came
        self.now = until

    def _demote(self) -> None:
        for job in sorted(self._running(), key=lambda job: job.number):
            if job.queue < len(LIMITS) and job.done * job.gpus >= LIMITS[job.queue]:
                self.queues[job.queue].remove(job)
                job.queue += 1
                self.queues[job.queue].append(job)

    def _choose(self) -> None:
        free = self.gpus
        for queue in self.queues:
            if not self.own_lists:
                queue.sort(key=lambda job: (not job.runs, job.number))
            for job in queue:
                chosen = job.gpus <= free
                free -= job.gpus if chosen else 0
                self.stops += job.runs and not chosen
                job.runs = chosen
            queue.sort(key=lambda job: not job.runs)

    def _jump(self, job: Job) -> float:
        if job.queue == len(LIMITS):
            return math.inf
        had = job.done if self.own_jumps else job.done * job.gpus
        seconds = (LIMITS[job.queue] - had) / job.gpus
        return self.now + (math.floor(seconds) if self.floor else math.ceil(seconds))


def figures(replay: Replay) -> dict[str, float]:
    replay.run()
    average = math.fsum(replay.jct.values()) / len(replay.jct)
    return {"avg_jct": average, "makespan": replay.now, "preemptions": replay.stops}


@WANTED
@pytest.mark.parametrize(("floor", "row"), [(False, f"{DLAS} Py3"), (True, f"{DLAS} Py2")])
def test_with_both_of_its_rules_the_replay_is_tiresias_to_the_second(floor: bool, row: str) -> None:
    trace = load(BENCH / "philly_0e4a51.csv")
    found = figures(Replay(trace, 48, own_lists=True, own_jumps=True, floor=floor))
    published = expected("philly_0e4a51", row, "count")
    assert found == pytest.approx({name: float(published[name]) for name in found}, abs=0.01)


@pytest.mark.deep
@WANTED
def test_with_neither_it_is_las_and_the_lists_make_the_difference() -> None:
    trace = load(BENCH / "philly_0e4a51.csv")
    result = simulate(trace, "6x8", queue="las", placement="count")
    ours = figures(Replay(trace, 48, own_lists=False, own_jumps=False))
    assert ours["avg_jct"] == pytest.approx(result.avg_jct_seconds, abs=0.1)  # the replay falls at whole seconds
    assert ours["preemptions"] == result.preemptions
    lists = figures(Replay(trace, 48, own_lists=True, own_jumps=False))
    assert (round(lists["avg_jct"]), lists["preemptions"]) == (376_142, 1_710)


def test_on_the_sample_the_replay_with_neither_is_las_too() -> None:
    trace = load("sample")
    result = simulate(trace, "2x8", queue="las", placement="count")
    ours = figures(Replay(trace, 16, own_lists=False, own_jumps=False))
    assert ours["preemptions"] == result.preemptions > 0
    assert ours["avg_jct"] == pytest.approx(result.avg_jct_seconds, abs=1.0)
