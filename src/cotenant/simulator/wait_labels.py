"""For what each waiting job waits: meters of shapes and of kinds, and who is on which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from cotenant.core.model.refusal import Refusal, Wait
from cotenant.simulator.job import Life, Shape
from cotenant.simulator.wait_times import CAUSE_OF, CAUSES, Cause, Meter, cause_of


class Labels:
    """Keeps waiting jobs on meters.

    `by_shape`: gangs of one shape wait for one reason, but for some, and that is their shape's meter's to tell; else
    all but some wait for capacity.
    """

    def __init__(self, *, by_shape: bool) -> None:
        self._by_shape = by_shape
        self._meters = {cause: Meter(cause=cause) for cause in CAUSES}
        self._apart: dict[int, Life] = {}  # those on another meter than most, by sequence

    def begin(self, life: Life, now: float) -> None:
        """Put a job that begins to wait where most are."""
        life.begin_to_wait(self._most(life), now)

    def begin_apart(self, life: Life, wait: Wait, now: float) -> None:
        """Let a job that is not the scheduler's for a while wait for something of its own."""
        life.begin_to_wait(self._meters[CAUSE_OF[wait]], now)

    def _most(self, life: Life) -> Meter:
        return life.shape.meter if self._by_shape else self._meters[CAUSE_OF[Wait.CAPACITY]]

    def follow(self, life: Life, now: float) -> None:
        """Let a waiting job that is of another shape from now on wait as most of those do, unless it waits apart."""
        if life.sequence not in self._apart:
            life.move(self._most(life), now)

    def turn(self, shapes: Iterable[Shape], known: Callable[[Shape], Refusal | None], now: float) -> None:
        """Say for what the gangs of each waiting shape wait from now on."""
        if self._by_shape:
            for shape in shapes:
                refusal = known(shape)
                shape.meter.turn(cause_of(refusal) if refusal else CAUSE_OF[Wait.CAPACITY], now)

    def set_apart(self, waits: Mapping[int, tuple[Life, Cause]], now: float) -> None:
        """Say who waits for something of their own from now on; all others are where most are."""
        for sequence, life in self._apart.items():
            if sequence not in waits:
                life.move(self._most(life), now)
        for life, cause in waits.values():
            life.move(self._meters[cause], now)
        self._apart = {sequence: life for sequence, (life, _) in waits.items()}
