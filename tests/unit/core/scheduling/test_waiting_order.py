"""The order of waiting jobs that is kept from cycle to cycle, compared with sorting all jobs in each cycle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant import plugins
from cotenant.core.model.job_table import Capacity, Ints, JobRow, JobTable
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.scheduling.cycle import Admission
from cotenant.core.scheduling.ordering import rank
from cotenant.core.scheduling.waiting_order import WaitingOrder

CAPACITY = Capacity(gpu_milli=6000, cores=20)
NEEDS = ((1000, 2), (2000, 1), (3000, 6), (0, 3), (8000, 1))  # GPUs in thousandths and cores, by class; one never fits
POLICIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("fifo", {}),
    ("fifo", {"mode": "backfill"}),
    ("las", {}),
    ("sjf", {}),
    ("sjf", {"mode": "backfill", "unknown": "attained"}),
    ("srtf", {}),
    ("srsf", {}),
    ("srsf", {"unknown": "first"}),
    ("edf", {}),
)
SECONDS = st.sampled_from([0.0, 0.25, 1.0, 60.0, 500.0, 4000.0])


@dataclass
class Cluster:
    """A few jobs and their table; `waiting` is kept up to date, and `decide` does what a cycle counts."""

    policy: QueuePolicy
    table: JobTable = field(default_factory=JobTable)
    waiting: WaitingOrder = field(default_factory=WaitingOrder)
    code: dict[str, int] = field(default_factory=dict)
    now: float = 0.0
    submitted: int = 0

    def arrive(self, code: int, priority: int, total: float, deadline: float) -> None:
        name, (gpu_milli, cores) = f"j{self.submitted}", NEEDS[code]
        row = JobRow(name, self.now, self.submitted, gpu_milli, cores, priority=priority, deadline_seconds=deadline)
        self.table.add(row)
        self.table.update(name, predicted_seconds=total, confidence=float(np.isfinite(total)))
        self.submitted += 1
        self.wait(name, code)

    def wait(self, name: str, code: int) -> None:
        self.code[name] = code
        self.waiting.add(name, code)

    def resize(self, name: str, code: int) -> None:
        self.waiting.remove(name, self.code[name])
        self.table.update(name, gpu_milli=NEEDS[code][0], cores=NEEDS[code][1])
        self.wait(name, code)

    def start(self, name: str) -> None:
        self.waiting.remove(name, self.code[name])
        self.table.start(name, self.now)

    def stop(self, name: str) -> None:
        self.table.stop(name, self.now)
        self.wait(name, self.code[name])

    def end(self, name: str) -> None:
        if not self.table.running(name):
            self.waiting.remove(name, self.code[name])
        self.table.remove(name)
        del self.code[name]

    def free(self) -> tuple[int, int]:
        held = [NEEDS[code] for name, code in self.code.items() if self.table.running(name)]
        return CAPACITY.gpu_milli - sum(gpus for gpus, _ in held), CAPACITY.cores - sum(cores for _, cores in held)

    def enough(self) -> dict[int, int]:
        free = self.free()
        fitting = {
            code: [have // need for have, need in zip(free, NEEDS[code], strict=True) if need] for code in range(5)
        }
        return {code: 1 + max(0, min(some)) for code, some in fitting.items()}

    def admission(self, rows: Ints | None = None) -> Admission:
        jobs = self.table.jobs(self.now, rows)
        return Admission(jobs, self.policy.order(jobs, self.now), self.policy, CAPACITY, self.now)

    def check(self) -> list[str]:
        """Compare what follows from the front with what follows from all jobs; returns the starts."""
        whole = self.admission()
        ranked = rank(whole.jobs, whole.order, running_first=False, among=~whole.jobs.running)
        if self.policy.strict:
            first = next((self.code[name] for name in self.named(whole, ranked)), None)
            assert self.waiting.first_class(self.table, self.admission) == first
        front = self.waiting.admit(self.table, self.enough(), self.admission)
        starts, ids = self.named(whole, whole.choice.starts), self.named(front, front.choice.starts)
        if self.policy.preemptive:
            assert ids == starts
            assert self.named(front, front.choice.victims) == self.named(whole, whole.choice.victims)
            assert front.choice.ahead().tolist() == whole.choice.ahead().tolist()
        else:  # no more of a class than find a place in what is free
            assert ids == [name for name in starts if name in set(ids)]
            for code, count in self.enough().items():
                mine = [name for name in starts if self.code[name] == code][:count]
                assert [name for name in ids if self.code[name] == code][:count] == mine
        assert front.valid_seconds == whole.valid_seconds
        lines = self.waiting.front(dict.fromkeys(range(5), 1000)).job_ids
        for code in range(5):
            mine = [name for name in self.named(whole, ranked) if self.code[name] == code]
            assert [name for name in lines if self.code[name] == code] == mine
        return starts

    def named(self, admission: Admission, rows: Ints) -> list[str]:
        return [f"j{number}" for number in admission.jobs.sequence[rows].tolist()]

    def decide(self) -> None:
        """Do what the cycle decides, as far as there is room for it."""
        starts = self.check()
        for name in self.named(one := self.admission(), one.choice.victims):
            if self.policy.preemptive and not one.choice.selected[self.table.row(name)]:  # type: ignore[index]  # it has one
                self.stop(name)
        for name in starts:
            needs = NEEDS[self.code[name]]
            if all(need <= have for need, have in zip(needs, self.free(), strict=True)):
                self.start(name)


@pytest.mark.parametrize(("name", "options"), POLICIES)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_front_decides_as_all_jobs_do(name: str, options: dict[str, str], data: st.DataObject) -> None:
    cluster = Cluster(plugins.load("cotenant.queue_policies", name, options))
    assert cluster.policy.fixed_while_waiting  # type: ignore[attr-defined]  # only such policies are here
    for _ in range(data.draw(st.integers(1, 25))):
        jobs = sorted(cluster.code)
        running = [job for job in jobs if cluster.table.running(job)]
        waiting = [job for job in jobs if job not in running]
        deed = data.draw(st.sampled_from(["arrive", "arrive", "arrive", "end", "stop", "resize", "decide", "decide"]))
        if deed == "arrive":
            total = data.draw(st.sampled_from([np.nan, 0.0, 10.0, 500.0, 5000.0]))
            deadline = data.draw(st.sampled_from([np.inf, np.inf, cluster.now + 100]))
            cluster.arrive(data.draw(st.integers(0, 4)), data.draw(st.sampled_from([0, 0, 0, 1])), total, deadline)
        elif deed == "end" and jobs:
            cluster.end(data.draw(st.sampled_from(jobs)))
        elif deed == "stop" and running:
            cluster.stop(data.draw(st.sampled_from(running)))
        elif deed == "resize" and waiting:
            cluster.resize(data.draw(st.sampled_from(waiting)), data.draw(st.integers(0, 4)))
        elif deed == "decide":
            cluster.decide()
        cluster.now += data.draw(SECONDS)
        cluster.check()


def test_many_of_one_class_that_outrank_running_jobs_are_all_found() -> None:
    """The front begins with one of the class, for nothing is free, and is drawn again until one is left out."""
    cluster = Cluster(plugins.load("cotenant.queue_policies", "srtf", {}))
    cluster.arrive(2, 0, 5000.0, np.inf)
    cluster.arrive(2, 0, 5000.0, np.inf)
    cluster.decide()
    assert cluster.free()[0] == 0
    for _ in range(9):
        cluster.arrive(0, 0, 10.0, np.inf)
        cluster.check()
    assert cluster.check() == [f"j{number}" for number in range(2, 8)]


def test_a_cycle_looks_at_few_of_many_waiting_jobs() -> None:
    cluster = Cluster(plugins.load("cotenant.queue_policies", "las", {}))
    for number in range(2000):
        cluster.arrive(number % 5, 0, np.nan, np.inf)
    cluster.decide()
    looked_at: list[int] = []

    def counted(rows: Ints) -> Admission:
        looked_at.append(len(rows))
        return cluster.admission(rows)

    cluster.waiting.admit(cluster.table, cluster.enough(), counted)
    assert sum(looked_at) < 30
