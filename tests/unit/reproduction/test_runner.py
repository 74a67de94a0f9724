"""Cases run in other processes or in this one with the same figures, and finished cases are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from cotenant.reproduction.model import Asked, Case, Claim, Done, Figures, Findings, Stopped
from cotenant.reproduction.runner import CaseFailed, reproduce


@dataclass(frozen=True, slots=True)
class Doubled:
    """Doubles its number; fails for a negative one."""

    number: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Double it."""
        if stopped():
            return None
        if self.number < 0:
            raise ValueError("it is negative")
        return Figures({"double": 2.0 * self.number})


@dataclass
class Small:
    """A paper of a few cases."""

    numbers: Sequence[int] = (1, 2, 3)
    name: str = "small"
    title: str = "A small paper"
    reference: str = "nobody, never"
    claims: Sequence[Claim] = ()
    assumptions: Sequence[str] = ()
    unsaid: Sequence[str] = ()
    seen: dict[int, float] = field(default_factory=dict)

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Double each number."""
        return [Case("numbers", "doubled", number, Doubled(number)) for number in self.numbers]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the seen figures."""
        self.seen = {seed: figures.values["double"] for seed, figures in done.of("numbers", "doubled").items()}
        return Findings(())


ASKED = Asked(quick=True, seeds=(0,))


@pytest.mark.parametrize("processes", [1, 2])
def test_all_cases_are_done_wherever_they_run(processes: int) -> None:
    paper = Small()
    shown: list[tuple[int, int]] = []
    found = reproduce(paper, ASKED, processes=processes, progress=lambda done, of: shown.append((done, of)))
    assert paper.seen == {1: 2.0, 2: 4.0, 3: 6.0}
    assert found.complete
    assert shown == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_what_was_done_before_it_was_stopped_is_kept() -> None:
    paper = Small()
    counted: list[int] = []
    found = reproduce(paper, ASKED, stopped=lambda: len(counted) > 2, progress=lambda done, of: counted.append(done))
    assert paper.seen == {1: 2.0, 2: 4.0}
    assert not found.complete


@pytest.mark.parametrize("processes", [1, 2])
def test_a_case_that_breaks_is_named(processes: int) -> None:
    with pytest.raises(CaseFailed, match="doubled on numbers, seed -1: ValueError: it is negative"):
        reproduce(Small((1, -1)), ASKED, processes=processes)
