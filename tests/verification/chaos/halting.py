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

OF_LEADERS = (  # who comes there has just been elected, or was lately
    "election.won",
    "placement.loading",
    "upkeep.archived",
    "upkeep.forgetting",
)
OF_SWEEPS = ("upkeep.archived", "upkeep.forgetting")  # likewise, and finds that there is something to forget
GIVES_WAY_SECONDS = 8.0  # after so long another leader is asked to
SETTLE_SECONDS_MAX = 6.0  # when nothing else is wrong, for those who are still to come to theirs
HALTED_SECONDS = LEASE_SECONDS + 0.5  # likewise, for those who are there


@dataclass
class Halt:
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


class Halts:
    """All fail points of now.

    `leaders` says at which address each service is led, and `sweeps` whether a queue that begins to lead forgets jobs.
    """

    def __init__(
        self, mesh: Mesh, leaders: Callable[[], Mapping[str, str]], sweeps: Callable[[], bool] = lambda: True
    ) -> None:
        self.armed: Counter[str] = Counter()  # fail points at which something was to happen
        self.reached: Counter[str] = Counter()  # and those at which it did, and what
        self._mesh, self._leaders, self._sweeps = mesh, leaders, sweeps
        self._halts: list[Halt] = []

    def arm(self, step: Step, absence: Absence) -> None:
        """Wait for somebody at a fail point, as soon as nobody else is waited for there."""
        self._halts.append(Halt(step, absence))

    def look(self) -> list[str]:
        """See who has come, let go on who was halted for long enough; what was wrong with leaders that gave way."""
        wrong, armed = [], {halt.point for halt in self._halts if halt.armed and not halt.pid}
        for halt in list(self._halts):
            if halt.pid:
                if time.monotonic() >= halt.until:
                    self._release(halt)
            elif halt.armed:
                if halt.point in OF_LEADERS and not self._came(halt):
                    wrong.append(self._elect(halt))
                elif halt.point not in OF_LEADERS:
                    self._came(halt)
            elif halt.point not in armed:
                armed.add(halt.point)
                halt.armed = True
                self.armed[halt.point] += 1
                self._mesh.arm(halt.point, halt.action)
        return [what for what in wrong if what]

    def _came(self, halt: Halt) -> bool:
        """Take note of who came to a fail point, if anybody did."""
        if (taken := self._mesh.taken(halt.point)) is None:
            return False
        halt.part, halt.pid, seconds = taken
        self.reached[f"{halt.point} ({halt.action.partition('@')[0]})"] += 1
        halt.absence.begin = clock() - seconds
        halt.absence.node_ids = frozenset(self._mesh.node_ids[node] for node in cut_off_without({halt.part}))
        halt.since = time.monotonic()
        halt.until = halt.since + halt.step.seconds
        if halt.kills and halt.part:
            self._mesh.kill(halt.part)
        return True

    def _elect(self, halt: Halt) -> str:
        """Ask who leads to give way, and after a while whoever leads then."""
        if time.monotonic() - halt.asked < GIVES_WAY_SECONDS or (halt.point in OF_SWEEPS and not self._sweeps()):
            return ""
        name = self._mesh.at(self._leaders().get(halt.step.part, ""))
        if not name or not self._mesh.runs(name):
            return ""
        halt.asked = time.monotonic()
        return self._mesh.restart(name)

    def _release(self, halt: Halt) -> None:
        self._halts.remove(halt)
        if halt.part and halt.kills:
            self._mesh.come_back(halt.part)
        elif halt.part:
            self._mesh.thaw(halt.part, halt.pid)
        halt.absence.end = clock()

    def settling(self) -> bool:
        """Whether somebody is still to come, or to go on, when nothing else is wrong; who is halted is not for long."""
        for halt in self._halts:
            if halt.pid:
                halt.until = min(halt.until, halt.since + HALTED_SECONDS)
        return bool(self._halts)

    def end(self) -> None:
        """Wait for nobody any more."""
        for halt in list(self._halts):
            if halt.armed and not halt.pid:
                self._mesh.disarm(halt.point)
                self._came(halt)  # in this very moment
            self._release(halt)
