"""Memory bandwidth and last-level cache of attempts, through the kernel's resctrl file system.

Theory of operation. A control group of resctrl has a class of service, of which the hardware has few (often 16, on
some machines 4), and a monitoring group has a counter, of which there are some hundreds. What holds a task to a share
of the memory bandwidth is its class, and it holds each of its cores by itself; so all attempts that are held to the
same share can be in one class, and there are never more classes in use than there are shares. Each attempt has a
monitoring group of its own, in the control group that it is in:

    <root>/mon_groups/<attempt>                      free, and only watched
    <root>/cotenant-<percent>/mon_groups/<attempt>   held to so many percent

The kernel's own words about a refusal stand in `info/last_cmd_status`. A control group that nobody is in any more is
removed, so that its class can be had by others. Kernel documentation: Documentation/filesystems/resctrl.rst [D].
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import structlog

log = structlog.get_logger()

ROOT = Path("/sys/fs/resctrl")
CLASS_PREFIX = "cotenant-"
PASSES_MAX = 10
FULL_PERCENT = 100


class CannotHold(Exception):
    """The attempt is held to no share of the memory bandwidth, or to the one before; the text says why."""


class Files:
    """The few ways in which files are touched: the kernel's, or those of a tree that acts like it."""

    def make(self, path: Path) -> None:
        """Make a directory. Raises `OSError`."""
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Remove a group's directory with what the kernel has put into it. Raises `OSError`."""
        path.rmdir()

    def write(self, path: Path, text: str) -> None:
        """Write in a single call. Raises `OSError`."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> str:
        """Read, stripped; empty where it is absent or refuses."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""


class Resctrl:
    """The mounted file system. Its methods block for no longer than the kernel takes."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self._root, self._files = root, files or Files()
        features = self._read("info", "L3_MON", "mon_features").split()
        self.tells_bandwidth = "mbm_total_bytes" in features
        self.tells_cache = "llc_occupancy" in features
        self._domains = self._find_domains()
        self._percent_min = _whole(self._read("info", "MB", "min_bandwidth")) or 10
        self._percent_step = _whole(self._read("info", "MB", "bandwidth_gran")) or 10

    @classmethod
    def open(cls, root: Path = ROOT) -> Resctrl | None:
        """Find it; None where it is not mounted, or the hardware has nothing of it."""
        found = cls(root) if (root / "info").is_dir() else None
        return found if found is not None and (found.enforces or found.tells_bandwidth or found.tells_cache) else None

    @property
    def enforces(self) -> bool:
        """Whether an attempt can be held to a share of the memory bandwidth."""
        return bool(self._domains)

    def _read(self, *names: str) -> str:
        return self._files.read(self._root.joinpath(*names))

    def _find_domains(self) -> list[str]:
        """The sockets whose bandwidth can be shared out; none where it is counted in MiB per second (`mba_MBps`)."""
        for line in self._read("schemata").splitlines():
            kind, _, rest = line.strip().partition(":")
            shares = [word.partition("=") for word in rest.split(";")]
            if kind == "MB" and all(_whole(share.strip()) <= FULL_PERCENT for _, _, share in shares):
                return [domain.strip() for domain, _, _ in shares]
        return []

    def percent_of(self, percent: int) -> int:
        """The share that the hardware can have: not below the one that is asked for, but for the least it knows."""
        step = self._percent_step
        return min(FULL_PERCENT, max(self._percent_min, -(-percent // step) * step))

    # Holding.

    def hold(self, name: str, percent: int, threads: Callable[[], Iterable[int]]) -> int:
        """Hold an attempt to a share of the memory bandwidth in percent; tells which one holds. Raises `CannotHold`."""
        if not self.enforces:
            if percent < FULL_PERCENT:
                raise CannotHold("this machine cannot hold it to a share of the memory bandwidth")
            return FULL_PERCENT
        percent = self.percent_of(percent)
        group = self._class(percent)
        if group != self._root and not group.is_dir():
            self._make_class(group, percent)
        try:
            self._move(name, group, threads)
        except OSError as error:
            raise CannotHold(f"it cannot be moved to {group}: {self._why(error)}") from error
        finally:
            self._drop_empty(group)
        return percent

    def _class(self, percent: int) -> Path:
        return self._root if percent >= FULL_PERCENT else self._root / f"{CLASS_PREFIX}{percent}"

    def _make_class(self, group: Path, percent: int) -> None:
        try:
            self._files.make(group)
        except OSError as error:
            few = error.errno == errno.ENOSPC
            why = "all classes of service of the hardware are taken" if few else self._why(error)
            raise CannotHold(f"it cannot be held to {percent} % of the memory bandwidth: {why}") from error
        try:
            shares = ";".join(f"{domain}={percent}" for domain in self._domains)
            self._files.write(group / "schemata", f"MB:{shares}\n")
        except OSError as error:
            why = self._why(error)
            self._remove(group)
            raise CannotHold(f"the kernel does not take {percent} % of the memory bandwidth: {why}") from error

    def _why(self, error: OSError) -> str:
        told = self._read("info", "last_cmd_status")
        return told if told and told != "ok" else (error.strerror or str(error))

    def _move(self, name: str, group: Path, threads: Callable[[], Iterable[int]]) -> None:
        """Move all threads to a control group, and there to a monitoring group of their own where one is to be had."""
        own = group / "mon_groups" / name
        if (group / "mon_groups").is_dir() and not own.is_dir():
            try:
                self._files.make(own)
            except OSError as error:  # ENOSPC: all counters are taken; it is held all the same
                log.info("attempt_not_watched", attempt=name, error=self._why(error))
        told: set[int] = set()
        for _ in range(PASSES_MAX):  # what forks meanwhile is where its parent was
            fresh = set(threads()) - told
            if not fresh:
                break
            for thread in fresh:
                self._write_task(group, thread)
                if own.is_dir():
                    self._write_task(own, thread)
            told |= fresh
        for other in self._groups_of(name):
            if other != own:
                self._remove(other)

    def _write_task(self, group: Path, thread: int) -> None:
        try:
            self._files.write(group / "tasks", f"{thread}\n")
        except ProcessLookupError:
            return  # it has ended

    def _groups_of(self, name: str) -> Iterator[Path]:
        return (own for group in self._groups() if (own := group / "mon_groups" / name).is_dir())

    def _groups(self) -> Iterator[Path]:
        """The root and all control groups, also others' than ours."""
        yield self._root
        yield from (path.parent for path in sorted(self._root.glob("*/schemata")) if path.parent.name != "info")

    def _drop_empty(self, but: Path) -> None:
        """Remove our classes that nobody is in any more."""
        for group in list(self._groups()):
            ours = re.fullmatch(re.escape(CLASS_PREFIX) + r"\d+", group.name) is not None
            if ours and not self._files.read(group / "tasks") and not self._watched(group):
                self._remove(group)

    def _watched(self, group: Path) -> bool:
        return any(self._files.read(own / "tasks") for own in (group / "mon_groups").glob("*"))

    def _remove(self, group: Path) -> None:
        try:
            self._files.remove(group)
        except OSError as error:
            log.info("resctrl_group_not_removed", group=str(group), error=str(error))

    # Watching.

    def watch(self, name: str, threads: Callable[[], Iterable[int]]) -> bool:
        """See to it that an attempt is counted by itself, wherever it is; False where it cannot be."""
        if not (self.tells_bandwidth or self.tells_cache):
            return False
        own = next(self._groups_of(name), self._root / "mon_groups" / name)
        try:
            if not own.is_dir():
                self._files.make(own)
            inside = {int(word) for word in self._files.read(own / "tasks").split() if word.isdigit()}
            for thread in set(threads()) - inside:
                self._write_task(own, thread)
        except OSError:
            return False
        return True

    def moved_bytes(self, name: str) -> int | None:
        """Bytes that an attempt moved to and from memory since it is watched; None where that is not told."""
        return self._counted(next(self._groups_of(name), None), "mbm_total_bytes") if self.tells_bandwidth else None

    def cache_bytes(self, name: str) -> int | None:
        """What an attempt holds of the last-level cache; None where that is not told."""
        return self._counted(next(self._groups_of(name), None), "llc_occupancy") if self.tells_cache else None

    def moved_bytes_of_node(self) -> int | None:
        """Bytes that the whole machine moved; None where that is not told."""
        if not self.tells_bandwidth:
            return None
        moved = [self._counted(group, "mbm_total_bytes") for group in self._groups()]
        return sum(one for one in moved if one is not None) if None not in moved else None

    def _counted(self, group: Path | None, counter: str) -> int | None:
        """Add up a counter over all sockets. The kernel says "Unavailable" or "Error" where it cannot tell."""
        if group is None:
            return None
        texts = [self._files.read(domain / counter) for domain in sorted((group / "mon_data").glob("mon_L3_*"))]
        if not texts or not all(text.isdigit() for text in texts):
            return None
        return sum(map(int, texts))

    def forget(self, name: str) -> None:
        """Remove what was made for an attempt that has ended."""
        for own in list(self._groups_of(name)):
            self._remove(own)
        self._drop_empty(self._root)


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
