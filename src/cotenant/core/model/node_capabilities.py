"""What the executor of a node can do: our own agent everything, executors of others what they declare."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CoreControl(StrEnum):
    """How an executor keeps processes to their cores."""

    NONE = "none"
    PIN = "pin"  # from their start on
    RESIZE = "resize"  # also while they run


class Capability(StrEnum):
    """Something that an executor can do beyond starting, stopping and reporting attempts."""

    SIGNALS = "signals"
    LOGS = "logs"
    FILES = "files"
    SESSIONS = "sessions"
    THROTTLES = "throttles"
    PROFILES = "profiles"
    PRE_RUNS = "pre_runs"
    FOLDERS = "folders"
    SECRETS = "secrets"


@dataclass(frozen=True, slots=True)
class NodeCapabilities:
    """What an executor has declared.

    >>> NodeCapabilities(CoreControl.PIN, frozenset(Capability) - {Capability.PROFILES}).in_words
    'cores are pinned, not resized; no profiles'
    >>> EVERYTHING.in_words
    ''
    """

    cores: CoreControl = CoreControl.RESIZE
    able: frozenset[Capability] = frozenset(Capability)

    def can(self, capability: Capability) -> bool:
        """Return whether it can do something."""
        return capability in self.able

    @property
    def lacks(self) -> frozenset[Capability]:
        """What it cannot do."""
        return frozenset(Capability) - self.able

    @property
    def in_words(self) -> str:
        """What it cannot do; empty if it can do everything."""
        cores = {CoreControl.NONE: "cores are only counted", CoreControl.PIN: "cores are pinned, not resized"}
        missing = ", ".join(one.value.replace("_", "-") for one in Capability if one in self.lacks)
        return "; ".join(filter(None, (cores.get(self.cores, ""), f"no {missing}" if missing else "")))


EVERYTHING = NodeCapabilities()
