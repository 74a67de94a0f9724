"""Attaches a device program to a version 2 control group with the raw `bpf` system call; no library is needed.

The kernel keeps the program as long as the group exists; nothing has to be released.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable

from cotenant.node_agent.enforcement.device_program import Instruction
from cotenant.node_agent.supervisor.cgroups import GroupError

SYSTEM_CALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
PROG_LOAD, PROG_ATTACH, PROG_QUERY = 5, 8, 16  # enum bpf_cmd
CGROUP_DEVICE_PROGRAM, CGROUP_DEVICE = 15, 6  # enum bpf_prog_type, enum bpf_attach_type
ALLOW_MULTI = 2
LOG_BYTES = 65536
ATTRIBUTE_BYTES = 144  # of union bpf_attr; unset fields are zero
PROGRAMS_MAX = 64
LIBC = ctypes.CDLL(None, use_errno=True)


def attach_device_program(directory: str, program: Iterable[Instruction]) -> None:
    """Attach a program that decides which devices may be opened in a version 2 group. Raises `GroupError`."""
    group = -1
    try:
        group = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        loaded = _load(list(program))
        try:
            _call(PROG_ATTACH, struct.pack("=IIII", group, loaded, CGROUP_DEVICE, ALLOW_MULTI))
        finally:
            os.close(loaded)
        if not _attached(group):
            raise GroupError(f"the device program attached to {directory} is missing")
    except OSError as error:
        raise GroupError(f"cannot attach a device program to {directory}: {error.strerror}") from error
    finally:
        if group >= 0:
            os.close(group)


def _load(program: list[Instruction]) -> int:
    code = ctypes.create_string_buffer(b"".join(each.encode() for each in program))
    licence = ctypes.create_string_buffer(b"Apache-2.0")
    where = struct.pack("=IIQQ", CGROUP_DEVICE_PROGRAM, len(program), ctypes.addressof(code), ctypes.addressof(licence))
    try:
        return _call(PROG_LOAD, where)
    except OSError as error:
        log = ctypes.create_string_buffer(LOG_BYTES)
        try:
            return _call(PROG_LOAD, where + struct.pack("=IIQ", 1, LOG_BYTES, ctypes.addressof(log)))
        except OSError:
            words = log.value.decode(errors="replace").strip().splitlines()
            raise OSError(error.errno, f"{error.strerror} {words[-1] if words else ''}".strip()) from error


def _attached(group: int) -> int:
    """Return how many device programs a group has of its own."""
    ids = (ctypes.c_uint32 * PROGRAMS_MAX)()
    query = bytearray(struct.pack("=IIIIQI", group, CGROUP_DEVICE, 0, 0, ctypes.addressof(ids), PROGRAMS_MAX))
    answer = _buffer(query)
    _check(LIBC.syscall(_number(), PROG_QUERY, answer, ATTRIBUTE_BYTES))
    return int(struct.unpack_from("=I", answer.raw, 24)[0])


def _buffer(attribute: bytes | bytearray) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes(attribute).ljust(ATTRIBUTE_BYTES, b"\0"), ATTRIBUTE_BYTES)


def _call(command: int, attribute: bytes) -> int:
    return _check(LIBC.syscall(_number(), command, _buffer(attribute), ATTRIBUTE_BYTES))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _number() -> int:
    try:
        return SYSTEM_CALLS[platform.machine()]
    except KeyError:
        raise OSError(0, f"the number of system call bpf is unknown for {platform.machine()}") from None
