"""How much is tried: few examples in `make test`, many in `make verify`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings

from cotenant.conformance.trials import FULL
from cotenant.conformance.trials import examples as examples

T = TypeVar("T")
SHORT, DEEP = FULL // 10, FULL * 10


def register_profiles() -> None:
    """Register the profiles (`--hypothesis-profile`), and load `ci` in continuous integration, else `dev`.

    What holds up a change is decided by the same examples each time; everybody else's runs look for new ones. No
    example has a deadline, and filters may reject many: a loaded machine and bad luck say nothing of the code. `deep`
    draws many; `mutation` only asks whether a test fails, so it does not look for the smallest example.
    """
    lenient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    settings.register_profile("dev", lenient, max_examples=SHORT)
    settings.register_profile("ci", lenient, max_examples=SHORT, derandomize=True, database=None)
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutation",
        lenient,
        max_examples=SHORT,
        derandomize=True,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
    )
    settings.register_profile("deep", lenient, max_examples=DEEP)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")


def amount(short: int, *, deep: int) -> int:
    """Return how much of something a costly test does: more in the profile `deep`."""
    return deep if is_deep() else short


def some(cases: Sequence[T], count: int) -> Sequence[T]:
    """Return some of the cases of a costly test, evenly spread over all: these, in the profile `deep`.

    >>> some("abcdefg", 3)
    ['a', 'd', 'g']
    """
    if is_deep() or count >= len(cases):
        return cases
    return [cases[round(number * (len(cases) - 1) / max(1, count - 1))] for number in range(count)]


def is_deep() -> bool:
    """Return whether the loaded profile is `deep`."""
    return settings.get_current_profile_name() == "deep"
