"""Reads and writes the kernel's small files of one value each, and checks what was accepted.

The supervisor loads this file by its bare name without the package, so it imports next to nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.launch_faults import LIMIT_ERRORS
else:
    from launch_faults import LIMIT_ERRORS


class GroupError(Exception):
    """The kernel did not accept a value; the text says what and why."""


CPU_DIGITS_MAX, NUMBER_DIGITS_MAX = 5, 20
READ_BYTES = 65536


def read_text(path: str) -> str:
    """Return a small kernel file's stripped content; "" if it is absent or unreadable."""
    try:
        return _read(path)
    except OSError:
        return ""


def read_if_present(path: str) -> str:
    """Return a small kernel file's stripped content; "" if it is absent.

    Raises:
        GroupError: this process lacks what it needs to read it, so the content is unknown.
    """
    try:
        return _read(path)
    except OSError as error:
        raise_shortage(error, path)
        return ""


def raise_shortage(error: OSError, path: str) -> None:
    """Raise `GroupError` if an error says nothing about the file, but that this process lacks descriptors or memory."""
    if error.errno in LIMIT_ERRORS:
        raise GroupError(f"cannot read {path}: {error.strerror}") from error


def _read(path: str) -> str:
    content = b""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while part := os.read(descriptor, READ_BYTES):
            content += part
    finally:
        os.close(descriptor)
    return content.decode("ascii", "replace").strip()


def write_text(path: str, text: str) -> None:
    """Write one value in a single call, as the kernel requires. Raises `GroupError`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise GroupError(f"cannot write {text!r} to {path}: {error.strerror}") from error


def put(path: str, text: str) -> None:
    """Write one value and read it back. Raises `GroupError`."""
    write_text(path, text)
    if (taken := read_text(path)) != text:
        raise GroupError(f"requested {text} in {path}, the kernel gives {taken!r}")


def parse_cpu_list(text: str) -> list[int]:
    """Parse the kernel's list format; invalid parts are skipped.

    >>> parse_cpu_list("0-2,5,8-9")
    [0, 1, 2, 5, 8, 9]
    >>> parse_cpu_list("")
    []
    """
    numbers: set[int] = set()
    for part in text.replace("\n", "").split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if first.isdigit() and last.isdigit() and max(len(first), len(last)) <= CPU_DIGITS_MAX:
            numbers.update(range(int(first), int(last) + 1))
    return sorted(numbers)


def online_cpus(sysfs: str = "/sys") -> list[int]:
    """Return the online CPUs; none if the kernel does not list them."""
    return parse_cpu_list(read_text(f"{sysfs}/devices/system/cpu/online"))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs in the kernel's list format, without ranges.

    >>> format_cpu_list([5, 1, 0])
    '0,1,5'
    """
    return ",".join(str(cpu) for cpu in sorted(set(cpus)))


def number_in(text: str, key: str) -> int:
    """Return the value of `key` in a file of "key number" lines; 0 if missing.

    >>> number_in("low 0\\noom_kill 3", "oom_kill")
    3
    """
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit() and len(value) <= NUMBER_DIGITS_MAX:
            return int(value)
    return 0
