"""Control groups of the driver, which limit a part to less than its machine has."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts

OURS = "cotenant"  # a run's groups are looked up under this name for cleanup
TRIES = 20


@dataclass(frozen=True, slots=True)
class Limit:
    """A group in one hierarchy of version 1. Its removal moves processes back to the driver's group."""

    path: Path
    home: Path

    @classmethod
    def make(cls, controller: str, name: str) -> Limit | None:
        """Create a group; return None if there is no such hierarchy."""
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
        """Read a value; return "" if there is none."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text()
        return ""

    def take(self, pid: int) -> None:
        """Move a process into the group; its future children belong to it too. Do nothing if it has ended."""
        with contextlib.suppress(OSError):
            self.write("cgroup.procs", str(pid))

    def remove(self) -> None:
        """Move all processes out, and remove the group."""
        for _ in range(TRIES):
            for pid in self.read("cgroup.procs").split():
                with contextlib.suppress(OSError):
                    (self.home / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
