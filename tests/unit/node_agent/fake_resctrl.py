"""A tree that behaves like the kernel's resctrl: what it creates, refuses, and reports."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from cotenant.node_agent.enforcement.resctrl import Files


def oserror(code: int) -> OSError:
    return OSError(code, errno.errorcode[code])


class FakeKernel(Files):
    """A kernel with limited classes of service and counters; the root uses one of each."""

    def __init__(self, root: Path, *, classes: int = 4, counters: int = 8, schemata: str = "MB:0=100;1=100") -> None:
        self.root, self.classes, self.counters, self.schemata = root, classes, counters, schemata
        (root / "info" / "MB").mkdir(parents=True)
        (root / "info" / "L3_MON").mkdir()
        (root / "info" / "L3_MON" / "mon_features").write_text("llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n")
        (root / "info" / "MB" / "min_bandwidth").write_text("10\n")
        (root / "info" / "MB" / "bandwidth_gran").write_text("10\n")
        (root / "info" / "last_cmd_status").write_text("ok\n")
        self._populate(root)
        (root / "mon_groups").mkdir()

    def _populate(self, group: Path, *, monitors_only: bool = False) -> None:
        (group / "tasks").write_text("")
        if not monitors_only:
            (group / "schemata").write_text(f"    {self.schemata}\n    L3:0=7ff;1=7ff\n")
        for domain in ("mon_L3_00", "mon_L3_01"):
            (group / "mon_data" / domain).mkdir(parents=True)
            (group / "mon_data" / domain / "mbm_total_bytes").write_text("0\n")
            (group / "mon_data" / domain / "llc_occupancy").write_text("0\n")

    def _refuse(self, code: int, why: str) -> None:
        (self.root / "info" / "last_cmd_status").write_text(f"{why}\n")
        raise oserror(code)

    def make(self, path: Path) -> None:
        monitors_only = path.parent.name == "mon_groups"
        if not path.parent.is_dir():
            raise oserror(errno.ENOENT)
        if path.exists():
            raise oserror(errno.EEXIST)
        everywhere = list(self.root.rglob("tasks"))
        if not monitors_only and sum((task.parent / "schemata").exists() for task in everywhere) >= self.classes:
            self._refuse(errno.ENOSPC, "Out of CLOSIDs")
        if len(everywhere) >= self.counters:
            self._refuse(errno.ENOSPC, "Out of RMIDs")
        path.mkdir()
        self._populate(path, monitors_only=monitors_only)
        if not monitors_only:
            (path / "mon_groups").mkdir()

    def remove(self, path: Path) -> None:
        """Move its tasks to the group above or to the root."""
        above = path.parent.parent if path.parent.name == "mon_groups" else self.root
        inside = {task for file in path.rglob("tasks") for task in file.read_text().split()}
        shutil.rmtree(path)
        self._put(above, inside)

    def _put(self, group: Path, tasks: set[str]) -> None:
        for file in self.root.rglob("tasks"):
            file.write_text("\n".join(sorted(set(file.read_text().split()) - tasks)))
        file = group / "tasks"
        file.write_text("\n".join(sorted(set(file.read_text().split()) | tasks)))

    def write(self, path: Path, text: str) -> None:
        word = text.strip()
        if path.name == "schemata":
            kind, _, rest = word.partition(":")
            for share in rest.split(";"):
                domain, _, percent = share.partition("=")
                if kind != "MB" or domain not in ("0", "1") or not 10 <= int(percent) <= 100:
                    self._refuse(errno.EINVAL, f"MB value {percent} out of range [10,100]")
            path.write_text(f"    {word}\n    L3:0=7ff;1=7ff\n")
        elif path.name == "tasks":
            if word == "99":
                raise ProcessLookupError(errno.ESRCH, "No such process")
            if path.parent.parent.name == "mon_groups" and self._class_of(word) != path.parent.parent.parent:
                self._refuse(errno.EINVAL, f"Can't move task {word} to different control group")
            self._put(path.parent, {word})

    def _class_of(self, task: str) -> Path:
        for file in self.root.rglob("tasks"):
            if task in file.read_text().split():
                group = file.parent
                return group.parent.parent if group.parent.name == "mon_groups" else group
        return self.root

    def count(self, group: Path, counter: str, *figures: object) -> None:
        for domain, figure in zip(("mon_L3_00", "mon_L3_01"), figures, strict=True):
            (group / "mon_data" / domain / counter).write_text(f"{figure}\n")
