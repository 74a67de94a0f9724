"""How many worlds a law is tried in, and when a world may take long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

FULL = 100  # Hypothesis' own default, to which the counts of laws refer


def examples(count: int) -> int:
    """Return a property's own number of examples in the loaded profile, at least three.

    >>> examples(1000) == 10 * settings().max_examples
    True
    """
    return max(3, count * settings().max_examples // FULL)


def tried(count: int = FULL) -> Callable[[Any], Any]:
    """Return the settings of a law that is tried in so many worlds, fewer or more in a profile that says so.

    No world has a deadline, and filters may reject many: a loaded machine and bad luck say nothing of a policy.
    """
    lenient = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=examples(count), deadline=None, suppress_health_check=lenient)
