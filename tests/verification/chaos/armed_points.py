"""Armed fail points: each stays armed until a process was killed or stopped there and the fault has lasted its time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.verification.chaos.judge import Absence
from tests.verification.chaos.mesh import Mesh
from tests.verification.chaos.plan import LEASE_SECONDS, Step, cut_off_without

from cotenant.history.recording import clock

LEADER_POINTS = (  # reached by a process that was just elected, or shortly before
    "election.won",
    "placement.loading",
    "upkeep.archived",
    "upkeep.forgetting",
)
RETENTION_POINTS = ("upkeep.archived", "upkeep.forgetting")  # likewise, by a queue that has jobs to remove
STEP_DOWN_SECONDS = 8.0  # after this time the next leader is asked to step down
SETTLE_SECONDS_MAX = 6.0  # without other faults, for processes that have not reached their point yet
HALTED_SECONDS = LEASE_SECONDS + 0.5  # likewise, for processes stopped at one


@dataclass
class ArmedPoint:
    """A fail point that is to be armed, is armed, or was reached by a part."""

    step: Step
    absence: Absence
    armed: bool = False
    step_down_requested_at: float = float("-inf")  # when a leader was last asked to step down
    pid: int = 0  # of the process that reached it
    part: str = ""  # its part; "" if another fault has ended it since
    since: float = 0.0
    until: float = 0.0

    @property
    def point(self) -> str:
        """Return the fail point's name."""
        return self.step.point.partition("=")[0]

    @property
    def action(self) -> str:
        """Return the action, and on which pass it happens."""
        return self.step.point.partition("=")[2]

    @property
    def kills(self) -> bool:
        """Return whether the action kills the process."""
        return self.action.startswith("kill")


class ArmedPoints:
    """All current fail points.

    `leaders` returns the leader's address for each service, and `sweeps` whether a new queue leader would remove jobs.
    """

    def __init__(
        self, mesh: Mesh, leaders: Callable[[], Mapping[str, str]], sweeps: Callable[[], bool] = lambda: True
    ) -> None:
        self.armed: Counter[str] = Counter()  # how often each point was armed
        self.reached: Counter[str] = Counter()  # how often each point and action took effect
        self.asks_leaders = True  # whether leaders are asked to step down, so that the next one reaches a point
        self._mesh, self._leaders, self._sweeps = mesh, leaders, sweeps
        self._points: list[ArmedPoint] = []

    def arm(self, step: Step, absence: Absence) -> None:
        """Queue a fail point; it is armed once no other fault waits for the same point."""
        self._points.append(ArmedPoint(step, absence))

    def poll(self) -> list[str]:
        """Handle reached points, release processes whose time is over; return errors of leaders that stepped down."""
        wrong, armed = [], {point.point for point in self._points if point.armed and not point.pid}
        for point in list(self._points):
            if point.pid:
                if time.monotonic() >= point.until:
                    self._release(point)
            elif point.armed:
                if point.point in LEADER_POINTS and not self._note_reached(point):
                    wrong.append(self._request_step_down(point))
                elif point.point not in LEADER_POINTS:
                    self._note_reached(point)
            elif point.point not in armed:
                armed.add(point.point)
                point.armed = True
                self.armed[point.point] += 1
                self._mesh.arm(point.point, point.action)
        return [what for what in wrong if what]

    def _note_reached(self, point: ArmedPoint) -> bool:
        """Return whether a process has reached the point, and record it."""
        if (reached := self._mesh.take_reached(point.point)) is None:
            return False
        point.part, point.pid, seconds = reached
        self.reached[f"{point.point} ({point.action.partition('@')[0]})"] += 1
        point.absence.begin = clock() - seconds
        point.absence.node_ids = frozenset(self._mesh.node_ids[node] for node in cut_off_without({point.part}))
        point.since = time.monotonic()
        point.until = point.since + point.step.seconds
        if point.kills and point.part:
            self._mesh.kill(point.part)
        return True

    def _request_step_down(self, point: ArmedPoint) -> str:
        """Ask the current leader to step down, and its successors after a while."""
        soon = time.monotonic() - point.step_down_requested_at < STEP_DOWN_SECONDS
        if not self.asks_leaders or soon or (point.point in RETENTION_POINTS and not self._sweeps()):
            return ""
        name = self._mesh.part_at(self._leaders().get(point.step.part, ""))
        if not name or not self._mesh.is_running(name):
            return ""
        point.step_down_requested_at = time.monotonic()
        return self._mesh.restart(name)

    def _release(self, point: ArmedPoint) -> None:
        self._points.remove(point)
        if point.part and point.kills:
            self._mesh.bring_back(point.part)
        elif point.part:
            self._mesh.thaw(point.part, point.pid)
        point.absence.end = clock()

    def is_settling(self) -> bool:
        """Return whether points are still pending without other faults; shorten the stops of processes at a point."""
        for point in self._points:
            if point.pid:
                point.until = min(point.until, point.since + HALTED_SECONDS)
        return bool(self._points)

    def end(self) -> None:
        """Disarm and release all points."""
        for point in list(self._points):
            if point.armed and not point.pid:
                self._mesh.disarm(point.point)
                self._note_reached(point)  # may just have been reached
            self._release(point)
