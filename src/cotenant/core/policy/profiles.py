"""Profiles: the policies of all groups, chosen to work together.

`full` is what a mesh runs unless it is told otherwise: the mechanisms of all papers together. A `paper:…` profile is
one paper's own part beside the usual baselines, so that it can be compared; `plain` has the baselines alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cotenant.core.spelling import did_you_mean

GROUPS = ("queue", "placement", "allocator", "predictor", "contention")
BACKFILL: Mapping[str, Mapping[str, str]] = MappingProxyType({"queue": {"mode": "backfill"}})


class UnknownProfile(LookupError):
    """There is no profile of that name; the message names similar ones."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Policies by name, and their options by group and key. Predictors are a list, asked in this order."""

    name: str
    summary: str
    queue: str = "fifo"
    placement: str = "consolidate"
    allocator: str = "proportional"
    predictor: str = "history"
    contention: str = "none"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def names(self, chosen: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Return the policy of each group: the chosen one, else the profile's."""
        return {group: chosen.get(group) or getattr(self, group) for group in GROUPS}

    def options_with(self, chosen: Mapping[str, str] = MappingProxyType({})) -> dict[str, dict[str, str]]:
        """Return the profile's options of the groups that keep its policy.

        >>> find("plain").options_with({"queue": "las"}), find("plain").options_with({"queue": "fifo"})
        ({}, {'queue': {'mode': 'backfill'}})
        """
        names = self.names(chosen)
        return {group: dict(own) for group, own in self.options.items() if names[group] == getattr(self, group)}


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(
                "full",
                "All of the papers together: the default of a mesh.",
                queue="borda-mlfq",
                placement="locality",
                allocator="coda-adaptive",
                predictor="loss-curve,latency,lightgbm-duration,history",
                contention="coda-eliminator",
                options={"placement": {"balance_cores": "true", "gpu_types": "true"}},
            ),
            Profile(
                "plain",
                "The usual baselines: first in, first out with backfill, and equal shares of cores.",
                options=BACKFILL,
            ),
            Profile(
                "paper:coda",
                "CODA: dominant resource fairness, arrays of cores, a search for cores, and contention relieved.",
                queue="drf",
                placement="multi-array",
                allocator="coda-adaptive",
                contention="coda-eliminator",
            ),
            Profile(
                "paper:genie",
                "GENIE: jobs that can wait least first, and placements that meet every objective.",
                queue="swaf",
                placement="qos",
                predictor="latency,scaling,history",
            ),
            Profile(
                "paper:aiturbo",
                "AITurbo: predictable and unpredictable jobs in one queue, and the cores that save most time.",
                queue="borda-mlfq",
                allocator="aiturbo",
                predictor="loss-curve,parameter-server,history",
                options={"queue": {"variant": "literal", "cadence_seconds": "1200"}},
            ),
            Profile(
                "paper:philly",
                "Philly: a gang waits for its server, then its rack, and then takes any place.",
                placement="locality",
                options=BACKFILL,
            ),
            Profile(
                "paper:xiao",
                "Xiao et al.: each job gets the cores beyond which its rate does not grow.",
                allocator="xiao",
                predictor="xiao-piecewise,history",
                options=BACKFILL,
            ),
        )
    }
)
DEFAULT = "full"


def find(name: str) -> Profile:
    """Return a profile.

    Raises:
        UnknownProfile: there is none of this name.
    """
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UnknownProfile(f"there is no profile {name!r}{did_you_mean(name, PROFILES)} (profiles: {known})")
    return PROFILES[name]
