"""Fail points that are armed, until somebody has been killed or halted there, and a while longer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.verification.chaos.judging import Absence
from tests.verification.chaos.parts import Mesh
from tests.verification.chaos.plan import LEASE_SECONDS, Step, cut_off_without

from cotenant.history.recording import clock

LEADER_POINTS = (  # who comes there has just been elected, or was lately
    "election.won",
    "placement.loading",
    "upkeep.archived",
    "upkeep.forgetting",
)
RETENTION_POINTS = ("upkeep.archived", "upkeep.forgetting")  # likewise, and finds that there is something to forget
STEP_DOWN_SECONDS = 8.0  # after so long another leader is asked to
SETTLE_SECONDS_MAX = 6.0  # when nothing else is wrong, for those who are still to come to theirs
HALTED_SECONDS = LEASE_SECONDS + 0.5  # likewise, for those who are there


@dataclass
class ArmedPoint:
    """A fail point that is to be armed, is, or was come to by a part."""

    step: Step
    absence: Absence
    armed: bool = False
    asked: float = float("-inf")  # when a leader was asked to give way
    pid: int = 0  # of who came
    part: str = ""  # which that was; "" where it has been ended by something else since
    since: float = 0.0
    until: float = 0.0

    @property
    def point(self) -> str:
        """Its name."""
        return self.step.point.partition("=")[0]

    @property
    def action(self) -> str:
        """What happens there, and when."""
        return self.step.point.partition("=")[2]

    @property
    def kills(self) -> bool:
        """Whether it ends who comes there."""
        return self.action.startswith("kill")


class ArmedPoints:
    """All fail points of now.

    `leaders` says at which address each service is led, and `sweeps` whether a queue that begins to lead forgets jobs.
    """

    def __init__(
        self, mesh: Mesh, leaders: Callable[[], Mapping[str, str]], sweeps: Callable[[], bool] = lambda: True
    ) -> None:
        self.armed: Counter[str] = Counter()  # fail points at which something was to happen
        self.reached: Counter[str] = Counter()  # and those at which it did, and what
        self._mesh, self._leaders, self._sweeps = mesh, leaders, sweeps
        self._halts: list[ArmedPoint] = []

    def arm(self, step: Step, absence: Absence) -> None:
        """Wait for somebody at a fail point, as soon as nobody else is waited for there."""
        self._halts.append(ArmedPoint(step, absence))

    def poll(self) -> list[str]:
        """See who has come, let go on who was halted for long enough; what was wrong with leaders that gave way."""
        wrong, armed = (
            [],
            {armed_point.point for armed_point in self._halts if armed_point.armed and not armed_point.pid},
        )
        for armed_point in list(self._halts):
            if armed_point.pid:
                if time.monotonic() >= armed_point.until:
                    self._release(armed_point)
            elif armed_point.armed:
                if armed_point.point in LEADER_POINTS and not self._note_reached(armed_point):
                    wrong.append(self._request_step_down(armed_point))
                elif armed_point.point not in LEADER_POINTS:
                    self._note_reached(armed_point)
            elif armed_point.point not in armed:
                armed.add(armed_point.point)
                armed_point.armed = True
                self.armed[armed_point.point] += 1
                self._mesh.arm(armed_point.point, armed_point.action)
        return [what for what in wrong if what]

    def _note_reached(self, armed_point: ArmedPoint) -> bool:
        """Take note of who came to a fail point, if anybody did."""
        if (take_reached := self._mesh.take_reached(armed_point.point)) is None:
            return False
        armed_point.part, armed_point.pid, seconds = take_reached
        self.reached[f"{armed_point.point} ({armed_point.action.partition('@')[0]})"] += 1
        armed_point.absence.begin = clock() - seconds
        armed_point.absence.node_ids = frozenset(
            self._mesh.node_ids[node] for node in cut_off_without({armed_point.part})
        )
        armed_point.since = time.monotonic()
        armed_point.until = armed_point.since + armed_point.step.seconds
        if armed_point.kills and armed_point.part:
            self._mesh.kill(armed_point.part)
        return True

    def _request_step_down(self, armed_point: ArmedPoint) -> str:
        """Ask who leads to give way, and after a while whoever leads then."""
        if time.monotonic() - armed_point.asked < STEP_DOWN_SECONDS or (
            armed_point.point in RETENTION_POINTS and not self._sweeps()
        ):
            return ""
        name = self._mesh.part_at(self._leaders().get(armed_point.step.part, ""))
        if not name or not self._mesh.is_running(name):
            return ""
        armed_point.asked = time.monotonic()
        return self._mesh.restart(name)

    def _release(self, armed_point: ArmedPoint) -> None:
        self._halts.remove(armed_point)
        if armed_point.part and armed_point.kills:
            self._mesh.bring_back(armed_point.part)
        elif armed_point.part:
            self._mesh.thaw(armed_point.part, armed_point.pid)
        armed_point.absence.end = clock()

    def is_settling(self) -> bool:
        """Whether somebody is still to come, or to go on, when nothing else is wrong; who is halted is not for long."""
        for armed_point in self._halts:
            if armed_point.pid:
                armed_point.until = min(armed_point.until, armed_point.since + HALTED_SECONDS)
        return bool(self._halts)

    def end(self) -> None:
        """Wait for nobody any more."""
        for armed_point in list(self._halts):
            if armed_point.armed and not armed_point.pid:
                self._mesh.disarm(armed_point.point)
                self._note_reached(armed_point)  # in this very moment
            self._release(armed_point)
