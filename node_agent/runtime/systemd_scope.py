"""A delegated scope in systemd's tree, apart from the agent's unit, so that jobs survive a restart of that unit.

systemd owns the tree of control groups and kills all processes of a stopped unit. It does not touch what it delegates:
a transient scope with `Delegate=yes`, which the manager creates around an existing process. One scope per node,
`cotenant-<node id>.scope`, holds the supervisors and, in version 2, the groups of all attempts. It exists while a
process is in it: an idle anchor process keeps it alive between jobs. The next agent finds it again.

The manager is called over the bus with `busctl`, which is part of systemd.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

BOOTED = Path("/run/systemd/system")  # exists if systemd is the system's manager [sd_booted(3)]
SERVICE, MANAGER = "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager"
PATH = "/org/freedesktop/systemd1"
CALL_SECONDS_MAX = 10.0
PLACED_SECONDS_MAX = 10.0
NO_LIMIT = str((1 << 64) - 1)
ANCHOR = ("sleep", "infinity")


class ScopeRefused(Exception):
    """systemd created no scope; the text says why."""


@dataclass(frozen=True, slots=True)
class Bus:
    """How to reach the manager: the system's as root, otherwise the user's own."""

    busctl: str
    user: bool

    def ask(self, *words: str) -> list[str]:
        """Call the manager and return the words of the answer, without the leading type. Raises `ScopeRefused`."""
        options = ["--user"] if self.user else []
        command = [self.busctl, *options, "--no-pager", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_SECONDS_MAX, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ScopeRefused(f"systemd does not answer: {error}") from error
        if done.returncode != 0:
            raise ScopeRefused(done.stderr.strip().replace("\n", "; ") or f"busctl exited with {done.returncode}")
        return shlex.split(done.stdout)[1:]

    def manager(self, method: str, *arguments: str) -> list[str]:
        """Call a method of the manager."""
        return self.ask("call", SERVICE, PATH, MANAGER, method, *arguments)


def reach_systemd(booted: Path = BOOTED) -> Bus | None:
    """Return the manager of this system; None if it is not systemd."""
    busctl = shutil.which("busctl")
    return Bus(busctl, os.geteuid() != 0) if busctl and booted.is_dir() else None


def scope_name(node_id: str) -> str:
    r"""Return the unit's name; invalid characters are escaped as systemd does [systemd-escape(1)].

    >>> scope_name("gpu 1")
    'cotenant-gpu\\x201.scope'
    """
    plain = "".join(c if c.isascii() and (c.isalnum() or c in ":_.-") else _escaped(c) for c in node_id)
    return f"cotenant-{plain}.scope"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def open_scope(bus: Bus, node_id: str) -> str:
    """Find or create the node's scope; return its control group as a path from the root of the tree. Blocks.

    Raises:
        ScopeRefused: systemd does not create it.
    """
    name = scope_name(node_id)
    try:
        return _control_group(bus, name)
    except ScopeRefused as error:
        log.info("scope_not_found", scope=name, why=str(error))
    anchor = subprocess.Popen(
        ANCHOR, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        bus.manager("StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", *_properties(node_id, anchor.pid), "0")
        return _wait_for(bus, name, anchor.pid)
    except ScopeRefused:
        anchor.kill()
        anchor.wait()
        raise


def _properties(node_id: str, pid: int) -> list[str]:
    properties: list[Sequence[str]] = [
        ("Description", "s", f"Cotenant's jobs on {node_id}"),
        ("PIDs", "au", "1", str(pid)),
        ("Delegate", "b", "true"),
        ("TasksMax", "t", NO_LIMIT),
        ("CollectMode", "s", "inactive-or-failed"),
    ]
    return [str(len(properties)), *(word for each in properties for word in each)]


def _control_group(bus: Bus, name: str) -> str:
    (unit,) = bus.manager("GetUnit", "s", name)
    (group,) = bus.ask("get-property", SERVICE, unit, "org.freedesktop.systemd1.Scope", "ControlGroup")
    if not group.startswith("/"):
        raise ScopeRefused(f"{name} has no control group")
    return group


def _wait_for(bus: Bus, name: str, pid: int) -> str:
    """Wait until the scope, which is created after the call has returned, contains the process."""
    deadline = time.monotonic() + PLACED_SECONDS_MAX
    while True:
        try:
            group = _control_group(bus, name)
            if f"{group}\n" in Path(f"/proc/{pid}/cgroup").read_text():
                return group
            why = f"process {pid} is not in {group}"
        except (ScopeRefused, OSError) as error:
            why = str(error)
        if time.monotonic() >= deadline:
            raise ScopeRefused(f"{name} was not created within {PLACED_SECONDS_MAX} s: {why}")
        time.sleep(0.02)
