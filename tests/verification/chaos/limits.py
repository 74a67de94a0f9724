"""Control groups of the driver's own, which hold a part to less than its machine has."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts

OURS = "cotenant"  # under which a run's groups are looked for when it is over
TRIES = 20


@dataclass(frozen=True, slots=True)
class Limit:
    """A group in one hierarchy of version 1. Processes go back where the driver is when it is removed."""

    path: Path
    home: Path

    @classmethod
    def make(cls, controller: str, name: str) -> Limit | None:
        """Make a group; None where there is no such hierarchy."""
        for mount in find_mounts():
            if controller in mount.controllers:
                path = Path(mount.root) / OURS / name
                path.mkdir(parents=True, exist_ok=True)
                return cls(path, Path(mount.own))
        return None

    def write(self, name: str, value: str) -> None:
        """Set a limit."""
        (self.path / name).write_text(value)

    def read(self, name: str) -> str:
        """Read a figure; empty where there is none."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text()
        return ""

    def take(self, pid: int) -> None:
        """Have a process in the group; what it starts from now on is there too. Nothing where it has ended."""
        with contextlib.suppress(OSError):
            self.write("cgroup.procs", str(pid))

    def remove(self) -> None:
        """Let all processes go, and remove the group."""
        for _ in range(TRIES):
            for pid in self.read("cgroup.procs").split():
                with contextlib.suppress(OSError):
                    (self.home / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
