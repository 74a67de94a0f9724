"""Completion of profiles' names."""

from __future__ import annotations

from cotenant.core.policy.profiles import PROFILES


def complete_profiles(incomplete: str) -> list[str]:
    """Return the profiles whose names begin like this."""
    return [name for name in PROFILES if name.startswith(incomplete)]
