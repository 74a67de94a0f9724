"""Checks a recording with simple means: counters by node, and a list of reasons for each job."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from cotenant.core.model.refusal import Code
from cotenant.simulator import Cluster, Result
from cotenant.simulator.recording.events import Event
from cotenant.simulator.wait_times import WAITS


@dataclass
class Tape:
    """Keeps every event."""

    events: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        self.events.append(event)


@dataclass
class History:
    """The events, replayed one by one."""

    cluster: Cluster
    submitted: dict[str, Event] = field(default_factory=dict)
    shapes: dict[str, int | None] = field(default_factory=dict)
    running: dict[str, Event] = field(default_factory=dict)
    waiting_since: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    given_up: dict[str, float] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    waited: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    used: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    down: set[int] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)  # in back-off, and in no queue
    failed_attempts: int = 0
    now: float = 0.0

    def take(self, event: Event) -> None:
        assert event.at_seconds >= self.now, "time runs backwards"
        if event.at_seconds > self.now:
            self._pass(event.at_seconds)
        self.now = event.at_seconds
        getattr(self, f"_{event.kind}", lambda _: None)(event)

    def _resized(self, event: Event) -> None:
        start = self.running[event.job_id]
        assert start.run == event.run
        assert event.cores == sum(place.cores for place in event.nodes) != start.cores
        for before, after in zip(start.nodes, event.nodes, strict=True):
            assert replace(before, cores=after.cores) == after, "a resize changes cores alone"
            self.used[after.node].update(cores=after.cores - before.cores)
        self.running[event.job_id] = replace(start, nodes=event.nodes, cores=event.cores)

    def _pass(self, until: float) -> None:
        for node, used in self.used.items():  # lent cores are reclaimed at the instant of a start
            assert used["cores"] <= self.cluster.shapes[node].cores
        for job_id in self.waiting_since:
            self.waited[job_id][self.reasons[job_id]] += until - self.now  # type: ignore[assignment]  # a counter of seconds

    def _submitted(self, event: Event) -> None:
        assert event.job_id not in self.submitted
        self.submitted[event.job_id] = event
        self.shapes[event.job_id] = event.shape
        self.waiting_since[event.job_id] = event.at_seconds

    def _started(self, event: Event) -> None:
        self.waiting_since.pop(event.job_id)  # submitted, and not yet running
        self.reasons.pop(event.job_id, None)
        self.apart.discard(event.job_id)
        self.shapes[event.job_id] = self.submitted[event.job_id].shape
        self.running[event.job_id] = event
        self.runs[event.job_id] += 1
        assert event.run == self.runs[event.job_id]
        assert event.gpu_milli == sum(place.gpu_milli for place in event.nodes)
        for place in event.nodes:
            assert place.node not in self.down
            used, shape = self.used[place.node], self.cluster.shapes[place.node]
            used.update(gpu_milli=place.gpu_milli, cores=place.cores, memory_bytes=place.memory_bytes)
            assert used["gpu_milli"] <= shape.gpus * 1000
            assert used["memory_bytes"] <= shape.memory_bytes

    def _stopped(self, event: Event) -> None:
        start = self.running.pop(event.job_id)
        assert start.run == event.run
        assert event.ran_seconds == event.at_seconds - start.at_seconds
        for place in start.nodes:
            held = {"gpu_milli": place.gpu_milli, "cores": place.cores, "memory_bytes": place.memory_bytes}
            self.used[place.node].subtract(held)

    def _preempted(self, event: Event) -> None:
        assert event.by, "somebody was preempted for nobody"
        self._migrated(event)

    def _reclaimed(self, event: Event) -> None:
        self._preempted(event)

    def _migrated(self, event: Event) -> None:
        self._stopped(event)
        self.waiting_since[event.job_id] = event.at_seconds

    def _finished(self, event: Event) -> None:
        self._stopped(event)
        self.finished[event.job_id] = event.at_seconds

    def _given_up(self, event: Event) -> None:
        self.waiting_since.pop(event.job_id)  # it waits, and never runs
        self.given_up[event.job_id] = event.at_seconds

    def _attempt_failed(self, event: Event) -> None:
        self._stopped(event)
        self.failed_attempts += 1
        assert (event.node is None) == (event.code != "node_down")
        self.waiting_since[event.job_id] = event.at_seconds

    def _node_down(self, event: Event) -> None:
        assert event.node is not None
        self.down.add(event.node)

    def _node_up(self, event: Event) -> None:
        assert event.node in self.down
        self.down.remove(event.node)

    def _rate_changed(self, event: Event) -> None:
        assert self.running[event.job_id].run == event.run
        assert event.rate is not None  # 0: it is suspended

    def _waiting(self, event: Event) -> None:
        assert event.code in set(Code)
        assert event.detail
        if event.job_id:
            assert event.job_id in self.waiting_since
            self.reasons[event.job_id] = event.wait
            self.shapes[event.job_id] = self.shapes[event.job_id] if event.shape is None else event.shape
            (self.apart.add if event.code == Code.BACK_OFF else self.apart.discard)(event.job_id)
        else:
            assert event.shape is not None
            for job_id in self.waiting_since:
                if self.shapes[job_id] == event.shape and job_id not in self.apart:
                    self.reasons[job_id] = event.wait

    def agrees(self, result: Result) -> None:
        """Compare with the simulation's own figures."""
        kinds = [wait.value for wait in WAITS]
        for one in result.outcomes:
            assert self.finished.get(one.id) == one.finished_seconds
            assert self.given_up.get(one.id) == one.given_up_seconds
            waited = [self.waited[one.id][kind] for kind in kinds]
            assert all(abs(a - b) < 1e-6 for a, b in zip(waited, one.waits_seconds, strict=True)), (one.id, waited, one)
        stopped = sum(self.runs.values()) - len(self.running) - len(self.finished)
        assert stopped == result.preemptions + result.migrations + result.reclaims + self.failed_attempts
        assert result.crashes <= self.failed_attempts
