"""Memory bandwidth of the whole machine, from its memory controllers' counters (perf's `uncore_imc_*`).

Each controller counts the accesses to its channels; `cas_count_read` and `cas_count_write`, multiplied by the bytes per
access, are all traffic to and from memory. A counter is opened once per controller and socket and counts from then on.
Opening needs CAP_PERFMON or a low `perf_event_paranoid`; otherwise the bandwidth is unknown. Kernel: perf_event_open(2)
[D].
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from cotenant.node_agent.supervisor.cgroups import parse_cpu_list

log = structlog.get_logger()

DEVICES = Path("/sys/bus/event_source/devices")
EVENTS = ("cas_count_read", "cas_count_write")
SYSCALLS = {"x86_64": 298, "aarch64": 241}
ATTRIBUTE_BYTES = 64  # PERF_ATTR_SIZE_VER0
UNITS = {"MiB": 1 << 20, "Bytes": 1, "": 1}


@dataclass(frozen=True, slots=True)
class Counter:
    """One event of one controller, opened on a CPU of its socket, and the bytes per count."""

    type: int
    config: int
    cpu: int
    bytes_each: float


def find_counters(root: Path = DEVICES) -> list[Counter]:
    """Return all counters of the machine; controllers with an incomplete description are skipped."""
    return [counter for device in sorted(root.glob("uncore_imc*")) for counter in _counters_of(device)]


def _counters_of(device: Path) -> Iterator[Counter]:
    try:
        kind = int((device / "type").read_text())
        cpus = parse_cpu_list((device / "cpumask").read_text())
        for event in EVENTS:
            config = parse_event((device / "events" / event).read_text(), device)
            scale = float((device / "events" / f"{event}.scale").read_text())
            unit = (device / "events" / f"{event}.unit").read_text().strip()
            yield from (Counter(kind, config, cpu, scale * UNITS[unit]) for cpu in cpus)
    except (OSError, ValueError, KeyError) as error:
        log.info("memory_controller_skipped", device=device.name, error=str(error))


def parse_event(text: str, device: Path) -> int:
    """Return the configuration for an event's text, such as `event=0x04,umask=0x03`, in the device's format.

    Raises:
        OSError, ValueError: the format is missing or unsupported.
    """
    config = 0
    for term in text.strip().split(","):
        name, _, value = term.partition("=")
        where = (device / "format" / name).read_text().strip()  # such as config:0-7
        field, _, bits = where.partition(":")
        first, _, _ = bits.partition("-")
        if field != "config" or "," in bits:
            raise ValueError(f"unsupported location of {name}: {where}")
        config |= int(value or "1", 0) << int(first)
    return config


def open_counter(counter: Counter) -> int:
    """Open a counter; return its descriptor. Raises `OSError`."""
    call = SYSCALLS.get(platform.machine())
    if call is None:
        raise OSError(f"the number of perf_event_open is unknown for {platform.machine()}")
    attribute = struct.pack("=IIQ", counter.type, ATTRIBUTE_BYTES, counter.config).ljust(ATTRIBUTE_BYTES, b"\0")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = int(syscall(call, ctypes.c_char_p(attribute), -1, counter.cpu, -1, 8))  # 8: close on exec
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


class Uncore:
    """Open counters."""

    def __init__(self, counters: list[Counter], open_one: Callable[[Counter], int] = open_counter) -> None:
        """Open all counters, or none. Raises `OSError`."""
        self._open: list[tuple[int, Counter]] = []
        try:
            for counter in counters:
                self._open.append((open_one(counter), counter))
        except OSError:
            self.close()
            raise

    @classmethod
    def open(cls, root: Path = DEVICES) -> Uncore | None:
        """Find and open the counters; None if there are none or they are not permitted."""
        counters = find_counters(root)
        try:
            return cls(counters) if counters else None
        except OSError as error:
            log.info("memory_controllers_unreadable", error=str(error))
            return None

    def moved_bytes(self) -> int | None:
        """Return the bytes moved to and from memory since the counters were opened; None if they are unreadable."""
        try:
            return int(sum(_count(descriptor) * counter.bytes_each for descriptor, counter in self._open))
        except (OSError, struct.error):
            return None

    def close(self) -> None:
        """Close the counters."""
        while self._open:
            os.close(self._open.pop()[0])


def _count(descriptor: int) -> int:
    return int(struct.unpack("=Q", os.read(descriptor, 8))[0])
