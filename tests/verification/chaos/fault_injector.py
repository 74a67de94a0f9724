"""Begins each fault of a plan, ends it when its time is over, and determines whether it had an effect."""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.end_to_end.commands import Serving
from tests.verification.chaos.armed_points import ArmedPoints
from tests.verification.chaos.degradation_faults import DegradationFaults
from tests.verification.chaos.impostor import MET
from tests.verification.chaos.judge import DISK_FULL, Absence
from tests.verification.chaos.link import Impairment
from tests.verification.chaos.machines import Pair
from tests.verification.chaos.mesh import ENDED_KEPT, Mesh
from tests.verification.chaos.plan import CLIENT, LASTING_SECONDS, NODES, PARTS, Fault, Step, cut_off
from tests.verification.chaos.recorder import Recorder
from tests.verification.chaos.store_faults import StoreFaults

from cotenant.history.recording import clock

GARBLED, GARBLED_BY_TLS = 0.5, 0.05  # share of the packets that can be garbled: all of them with TLS, which detects it
NO_ROOM = (DISK_FULL, "database or disk is full")  # as SQLite words it

End = Callable[[], bool]  # ends a fault, and returns whether it had an effect


def _end_with(end: Callable[[], None], did: bool) -> End:
    def ended() -> bool:
        end()
        return did

    return ended


class FaultInjector:
    """The current faults. `effective` counts those with an effect by kind, and `drawn` all."""

    def __init__(self, mesh: Mesh, recorder: Recorder, rng: Random) -> None:
        self.mesh, self.recorder = mesh, recorder
        self.armed_points = ArmedPoints(mesh, lambda: recorder.leaders, lambda: len(recorder.ended) > ENDED_KEPT)
        self.effective: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        self.absences: list[Absence] = []
        self.killed: set[tuple[str, int]] = set()  # attempts of which a process was killed by a fault
        self.wrong: list[str] = []
        self.store = StoreFaults(mesh, lambda: recorder.revision)
        self.degradation_faults = DegradationFaults(mesh, self.store, recorder.not_launched)
        self.on_begin: Callable[[Step], None] = lambda step: None  # called at the beginning of each lasting fault
        self.on_end: Callable[[Step], None] = lambda step: None  # and at its end
        self._rng = rng
        self._impostor: Serving | None = None
        self._ends: list[tuple[float, int, Step, End, Absence]] = []

    def effective_counts(self) -> Counter[str]:
        """Return the number of effective faults, by kind."""
        return self.effective + Counter({Fault.FAIL_POINT: self.armed_points.reached.total()})

    def begin(self, step: Step) -> None:
        """Begin a fault."""
        now = clock()
        self.drawn[step.fault] += 1
        absence = Absence(frozenset(self.mesh.node_ids[node] for node in cut_off(step)), now, now)
        self.absences.append(absence)
        if step.fault is Fault.FAIL_POINT:
            absence.end = math.inf
            self.armed_points.arm(step, absence)
            return
        end = self._begin(step)
        if isinstance(end, bool):
            self.effective[step.fault] += end
            return
        absence.end = math.inf
        heapq.heappush(self._ends, (time.monotonic() + step.seconds, step.number, step, end, absence))
        self.on_begin(step)

    def poll(self) -> None:
        """End the faults whose time is over."""
        self.wrong += [*self.armed_points.poll(), *self.store.take_wrong()]
        self.degradation_faults.tick()
        while self._ends and self._ends[0][0] <= time.monotonic():
            self._end_next()

    def end_all(self) -> None:
        """End all faults except fail points."""
        while self._ends:
            self._end_next()

    def _end_next(self) -> None:
        *_, step, end, absence = heapq.heappop(self._ends)
        self.effective[step.fault] += end()
        absence.end = clock()
        self.on_end(step)

    def end_of_named_faults(self) -> float:
        """Return when the last fault that `status` must name ends, on the monotonic clock; now if there is none."""
        lasting = (until for until, _, step, *_ in self._ends if step.seconds >= LASTING_SECONDS[0])
        return max(lasting, default=time.monotonic())

    def _begin(self, step: Step) -> End | bool:
        """Begin a fault; return how to end it or, if there is nothing to end, whether it had an effect."""
        mesh, part, peer = self.mesh, step.part, step.peer
        match step.fault:
            case Fault.KILL:
                return self._kill(part)
            case Fault.NO_MAJORITY:
                return self._kill(part, peer)
            case Fault.RESTART:
                if not mesh.is_running(part):
                    return False
                self.wrong += filter(None, [mesh.restart(part)])
            case Fault.KILL_JOB | Fault.KILL_SUPERVISOR:
                return self._kill_attempt(part, step.fault)
            case Fault.PAUSE:
                ran = mesh.is_running(part)
                mesh.pause(part)
                return _end_with(lambda: mesh.resume(part), ran)
            case Fault.FILL:
                return self._fill(part)
            case Fault.CLOCK:
                mesh.set_clock(part, step.amount)
            case Fault.OLD_LEADER:
                return self._replace(step)
            case Fault.CUT | Fault.CUT_ONE_WAY | Fault.ISOLATE | Fault.LOSE:
                return self._drop(step)
            case Fault.DELAY | Fault.GARBLE:
                return self._impair(step)
            case _:
                return self.degradation_faults.begin(step)
        return True

    def _kill(self, *parts: str) -> End:
        there = all(map(self.mesh.is_there, parts))
        self.mesh.kill(*parts)
        return _end_with(lambda: self.mesh.bring_back(*parts), there)

    def _fill(self, part: str) -> End:
        """Fill a disk. Effective if a process has noticed."""
        begin = self.mesh.log_size(part)
        self.mesh.fill_disk(part)

        def end() -> bool:
            self.mesh.free_disk(part)
            said = self.mesh.log_since(part, begin)
            return any(words in said for words in NO_ROOM)

        return end

    def _replace(self, step: Step) -> End | bool:
        """Replace the placement leader with a deposed one that only agents can reach, unless there is one already.

        It takes the current leader's address, so agents reconnect elsewhere.
        """
        if self._impostor:
            return False
        machines, part = self.mesh.machines, self.mesh.part_at(self.recorder.leaders.get("placement", "")) or step.part
        pairs = [(other, part) for other in (*PARTS, CLIENT) if other not in (part, *NODES)]
        machines.drop(pairs)
        self._impostor = impostor = self.mesh.replace(part, self.recorder.placement_term - 1)

        def end() -> bool:
            self._impostor = None
            impostor.kill()
            machines.stop_dropping(pairs)
            self.mesh.bring_back(part)
            return MET in impostor.said

        return end

    def _drop(self, step: Step) -> End:
        share = step.amount or 1.0
        pairs = [(step.part, step.peer)]
        if step.fault is Fault.ISOLATE:
            pairs = [(step.part, other) for other in (*PARTS, CLIENT) if other != step.part]
        if step.fault is not Fault.CUT_ONE_WAY:
            pairs += [(target, source) for source, target in pairs]
        self.mesh.machines.drop(pairs, share)
        return self._end_and_check_traffic(pairs, lambda: self.mesh.machines.stop_dropping(pairs, share))

    def _impair(self, step: Step) -> End:
        tls = self.mesh.certificates is not None
        pairs, impairment = (
            [(step.part, step.peer)],
            Impairment(garbled=GARBLED_BY_TLS if tls else GARBLED, anywhere=tls),
        )
        if step.fault is Fault.DELAY:
            pairs, impairment = [*pairs, (step.peer, step.part)], Impairment(delay_seconds_max=step.amount)
        self.mesh.machines.impair(pairs, impairment)
        return self._end_and_check_traffic(pairs, lambda: self.mesh.machines.stop_impairing(pairs, impairment))

    def _end_and_check_traffic(self, pairs: Sequence[Pair], end: Callable[[], None]) -> End:
        before = self.mesh.machines.affected_packets(pairs)

        def ended() -> bool:
            affected_packets = self.mesh.machines.affected_packets(pairs) > before
            end()
            return affected_packets

        return ended

    def _kill_attempt(self, node: str, fault: Fault) -> bool:
        """Kill a supervisor or a process of a job, on this node if an attempt runs there, else on any."""
        states = list(self._running(node)) or [state for each in self.mesh.node_ids for state in self._running(each)]
        if not states:
            return False
        state = self._rng.choice(states)
        self.killed.add((state["job_id"], state["number"]))
        pid = state["pid"] if fault is Fault.KILL_SUPERVISOR else self._rng.choice(state["tasks"])["pid"]
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if os.fsencode(self.mesh.directory) in Path(f"/proc/{pid}/cmdline").read_bytes():
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    return True
            finally:
                os.close(pidfd)
        return False

    def _running(self, node: str) -> Iterator[dict[str, Any]]:
        """Yield the supervisors' records of attempts running on a node."""
        for path in sorted(self.mesh.machines.all[node].disk.glob("state/nodes/*/attempts/*/state.json")):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_bytes())
                if state["state"] == "RUNNING":
                    yield state
