"""Parts that are started with a fail point armed, until they have been killed or halted there, and a while longer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.chaos.judging import Absence
from tests.chaos.parts import Mesh
from tests.chaos.plan import Step

from cotenant.history.recording import clock

REACHED_SECONDS_MAX = 40.0  # after which a part that did not come to its fail point is started again without one


@dataclass
class Halt:
    """A part with an armed fail point."""

    step: Step
    absence: Absence
    until: float
    gave_way: bool = False  # whether the other replica was restarted, so that this one leads
    halted: bool = False


class Halts:
    """All that are armed now."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._armed: list[Halt] = []

    def arm(self, step: Step, absence: Absence) -> str:
        """Restart a part with a fail point, unless one like it is armed already; what was wrong with its end."""
        if any({step.part, step.peer} & {halt.step.part, halt.step.peer} - {""} for halt in self._armed):
            absence.end = absence.begin
            return ""
        self._armed.append(Halt(step, absence, time.monotonic() + REACHED_SECONDS_MAX))
        return self._mesh.restart(step.part, step.point)

    def look(self) -> list[str]:
        """Let the other replica give way, and let go on who was halted for long enough; what was wrong with that."""
        wrong = []
        for halt in list(self._armed):
            part, name = self._mesh.parts[halt.step.part], halt.step.part
            if part.points != halt.step.point or time.monotonic() >= halt.until:
                self._end(halt)
            elif not halt.halted and self._mesh.has_halted(name):
                halt.halted, halt.until = True, time.monotonic() + halt.step.seconds
            elif not halt.gave_way and self._mesh.serving(name):
                halt.gave_way = True
                wrong += [self._mesh.restart(halt.step.peer)] if halt.step.peer else []
        return [what for what in wrong if what]

    def end(self) -> None:
        """Arm nothing any more."""
        for halt in list(self._armed):
            self._end(halt)

    def _end(self, halt: Halt) -> None:
        self._armed.remove(halt)
        self._mesh.disarm(halt.step.part)
        halt.absence.end = clock()
