"""Memory bandwidth and last-level cache of attempts, through the kernel's resctrl file system.

Theory of operation. A control group of resctrl has a class of service, of which the hardware has few (often 16, on some
machines 4), and a monitoring group has a counter, of which there are some hundreds. A task's class limits its share of
the memory bandwidth, for each of its cores separately; so all attempts with the same share can be in one class, and
there are never more classes in use than distinct shares. Each attempt has a monitoring group of its own, within its
current control group:

    <root>/mon_groups/<attempt>                      unlimited, only monitored
    <root>/cotenant-<percent>/mon_groups/<attempt>   limited to so many percent

The kernel's reason for a refusal is in `info/last_cmd_status`. An empty control group is removed, so that its class is
available again. Kernel documentation: Documentation/filesystems/resctrl.rst [D].
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


class BandwidthRefused(Exception):
    """The attempt's memory bandwidth is not limited, or limited as before; the text says why."""


class Files:
    """File operations on the kernel's tree, or on a tree that behaves like it."""

    def make(self, path: Path) -> None:
        """Create a directory. Raises `OSError`."""
        path.mkdir()

    def remove(self, path: Path) -> None:
        """Remove a group's directory with the kernel's files in it. Raises `OSError`."""
        path.rmdir()

    def write(self, path: Path, text: str) -> None:
        """Write in a single call. Raises `OSError`."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> str:
        """Return the stripped content; "" if the file is absent or unreadable."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""


class Resctrl:
    """The mounted file system. Methods block only for the kernel's work."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self._root, self._files = root, files or Files()
        features = self._read("info", "L3_MON", "mon_features").split()
        self.measures_bandwidth = "mbm_total_bytes" in features
        self.measures_cache = "llc_occupancy" in features
        self._domains = self._find_domains()
        self._percent_min = _whole(self._read("info", "MB", "min_bandwidth")) or 10
        self._percent_step = _whole(self._read("info", "MB", "bandwidth_gran")) or 10

    @classmethod
    def open(cls, root: Path = ROOT) -> Resctrl | None:
        """Return the file system; None if it is not mounted or the hardware has none of its features."""
        found = cls(root) if (root / "info").is_dir() else None
        return (
            found
            if found is not None and (found.enforces or found.measures_bandwidth or found.measures_cache)
            else None
        )

    @property
    def enforces(self) -> bool:
        """Whether attempts can be limited to a share of the memory bandwidth."""
        return bool(self._domains)

    def _read(self, *names: str) -> str:
        return self._files.read(self._root.joinpath(*names))

    def _find_domains(self) -> list[str]:
        """Return the sockets whose bandwidth can be limited; none if limits are in MiB per second (`mba_MBps`)."""
        for line in self._read("schemata").splitlines():
            kind, _, rest = line.strip().partition(":")
            shares = [word.partition("=") for word in rest.split(";")]
            if kind == "MB" and all(_whole(share.strip()) <= FULL_PERCENT for _, _, share in shares):
                return [domain.strip() for domain, _, _ in shares]
        return []

    def percent_of(self, percent: int) -> int:
        """Return the nearest supported share: at least the requested one and the hardware's minimum."""
        step = self._percent_step
        return min(FULL_PERCENT, max(self._percent_min, -(-percent // step) * step))

    # Throttling.

    def throttle(self, name: str, percent: int, threads: Callable[[], Iterable[int]]) -> int:
        """Limit an attempt to a share of the memory bandwidth in percent; return the effective one.

        Raises:
            BandwidthRefused: the hardware or the kernel does not support it.
        """
        if not self.enforces:
            if percent < FULL_PERCENT:
                raise BandwidthRefused("this machine cannot limit its memory bandwidth")
            return FULL_PERCENT
        percent = self.percent_of(percent)
        group = self._class_directory(percent)
        if group != self._root and not group.is_dir():
            self._make_class(group, percent)
        try:
            self._move(name, group, threads)
        except OSError as error:
            raise BandwidthRefused(f"cannot move it to {group}: {self._reason(error)}") from error
        finally:
            self._remove_empty_classes(group)
        return percent

    def _class_directory(self, percent: int) -> Path:
        return self._root if percent >= FULL_PERCENT else self._root / f"{CLASS_PREFIX}{percent}"

    def _make_class(self, group: Path, percent: int) -> None:
        try:
            self._files.make(group)
        except OSError as error:
            few = error.errno == errno.ENOSPC
            why = "all of the hardware's classes of service are in use" if few else self._reason(error)
            raise BandwidthRefused(f"cannot limit it to {percent} % of the memory bandwidth: {why}") from error
        try:
            shares = ";".join(f"{domain}={percent}" for domain in self._domains)
            self._files.write(group / "schemata", f"MB:{shares}\n")
        except OSError as error:
            why = self._reason(error)
            self._remove(group)
            raise BandwidthRefused(f"the kernel refuses {percent} % of the memory bandwidth: {why}") from error

    def _reason(self, error: OSError) -> str:
        status = self._read("info", "last_cmd_status")
        return status if status and status != "ok" else (error.strerror or str(error))

    def _move(self, name: str, group: Path, threads: Callable[[], Iterable[int]]) -> None:
        """Move all threads to a control group, and to a monitoring group of their own in it if one is available."""
        own = group / "mon_groups" / name
        if (group / "mon_groups").is_dir() and not own.is_dir():
            try:
                self._files.make(own)
            except OSError as error:  # ENOSPC: all counters are in use; it is throttled anyway
                log.info("attempt_not_monitored", attempt=name, error=self._reason(error))
        moved: set[int] = set()
        for _ in range(PASSES_MAX):  # a new process starts in its parent's old group
            fresh = set(threads()) - moved
            if not fresh:
                break
            for thread in fresh:
                self._write_task(group, thread)
                if own.is_dir():
                    self._write_task(own, thread)
            moved |= fresh
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
        """Yield the root and all control groups, including those of other programs."""
        yield self._root
        yield from (path.parent for path in sorted(self._root.glob("*/schemata")) if path.parent.name != "info")

    def _remove_empty_classes(self, but: Path) -> None:
        """Remove our classes that have no tasks."""
        for group in list(self._groups()):
            ours = re.fullmatch(re.escape(CLASS_PREFIX) + r"\d+", group.name) is not None
            if ours and not self._files.read(group / "tasks") and not self._monitored(group):
                self._remove(group)

    def _monitored(self, group: Path) -> bool:
        return any(self._files.read(own / "tasks") for own in (group / "mon_groups").glob("*"))

    def _remove(self, group: Path) -> None:
        try:
            self._files.remove(group)
        except OSError as error:
            log.info("resctrl_removal_failed", group=str(group), error=str(error))

    # Monitoring.

    def monitor(self, name: str, threads: Callable[[], Iterable[int]]) -> bool:
        """Give an attempt a monitoring group of its own in its control group; return False if that is impossible."""
        if not (self.measures_bandwidth or self.measures_cache):
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
        """Return the bytes that an attempt moved to and from memory since its monitoring began; None if unknown."""
        return (
            self._read_counter(next(self._groups_of(name), None), "mbm_total_bytes")
            if self.measures_bandwidth
            else None
        )

    def cache_bytes(self, name: str) -> int | None:
        """Return how much of the last-level cache an attempt occupies; None if unknown."""
        return self._read_counter(next(self._groups_of(name), None), "llc_occupancy") if self.measures_cache else None

    def moved_bytes_of_node(self) -> int | None:
        """Return the bytes that the whole machine moved; None if unknown."""
        if not self.measures_bandwidth:
            return None
        moved = [self._read_counter(group, "mbm_total_bytes") for group in self._groups()]
        return sum(count for count in moved if count is not None) if None not in moved else None

    def _read_counter(self, group: Path | None, counter: str) -> int | None:
        """Return a counter's sum over all sockets; None if the kernel says "Unavailable" or "Error"."""
        if group is None:
            return None
        texts = [self._files.read(domain / counter) for domain in sorted((group / "mon_data").glob("mon_L3_*"))]
        if not texts or not all(text.isdigit() for text in texts):
            return None
        return sum(map(int, texts))

    def forget(self, name: str) -> None:
        """Remove the groups of an attempt that has ended."""
        for own in list(self._groups_of(name)):
            self._remove(own)
        self._remove_empty_classes(self._root)


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0
