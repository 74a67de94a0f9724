"""Pressure stall information: the share of time in which tasks wait for CPU, memory or I/O."""

from __future__ import annotations

from pathlib import Path

from cotenant.node_agent.supervisor.cgroups import UNIFIED, Group
from cotenant.node_agent.supervisor.kernel_files import read_text
from cotenant.v1 import contention_service_pb2

PRESSURE = Path("/proc/pressure")


def parse_pressure(text: str) -> contention_service_pb2.Pressure:
    """Parse a file of /proc/pressure; missing values are 0.

    >>> parse_pressure("some avg10=1.50 avg60=0 avg300=0 total=9").some_avg10
    1.5
    """
    shares = {"some": 0.0, "full": 0.0}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        for word in rest.split():
            name, _, value = word.partition("=")
            if kind in shares and name == "avg10":
                try:
                    shares[kind] = float(value)
                except ValueError:
                    continue
    return contention_service_pb2.Pressure(some_avg10=shares["some"], full_avg10=shares["full"])


def read_pressure(resource: str, root: Path = PRESSURE) -> contention_service_pb2.Pressure:
    """Return the pressure on `cpu`, `memory` or `io`; zeros if the kernel does not report it."""
    return parse_pressure(read_text(str(root / resource)))


def pressure_within(group: Group, resource: str) -> contention_service_pb2.Pressure | None:
    """Return the pressure on `cpu` or `memory` within a control group; None if unknown, as in version 1."""
    directory = group.directories.get(UNIFIED) if group.version == 2 else None
    text = read_text(f"{directory}/{resource}.pressure") if directory else ""
    return parse_pressure(text) if text else None
