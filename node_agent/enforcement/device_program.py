"""Builds the eBPF program that denies access to some character devices.

Version 2 has no device files: a program of type `BPF_PROG_TYPE_CGROUP_DEVICE` is attached to a group and called at each
open and mknod within it. It gets `struct bpf_cgroup_dev_ctx {u32 access_type, major, minor}`, where the low half of
`access_type` is the type of device, and returns 1 to allow and 0 to deny [linux/bpf.h]. Several programs may be
attached along the path of a group; all of them must allow.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

CHARACTER_DEVICE = 2  # BPF_DEVCG_DEV_CHAR
ACCESS_TYPE, MAJOR, MINOR = 0, 4, 8  # offsets in the context
RESULT, CONTEXT, KIND, MAJOR_OF, MINOR_OF = range(5)  # registers: r0 is the result, r1 points to the context

LOAD_WORD = 0x61  # BPF_LDX | BPF_MEM | BPF_W
AND = 0x57  # BPF_ALU64 | BPF_AND | BPF_K
MOVE = 0xB7  # BPF_ALU64 | BPF_MOV | BPF_K
JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_UNEQUAL = 0x55  # BPF_JMP | BPF_JNE | BPF_K
EXIT = 0x95  # BPF_JMP | BPF_EXIT


class Device(NamedTuple):
    """A character device by its numbers."""

    major: int
    minor: int


class Instruction(NamedTuple):
    """One instruction; `offset` counts instructions in a jump, bytes in a load."""

    code: int
    target: int = 0
    source: int = 0
    offset: int = 0
    value: int = 0

    def encode(self) -> bytes:
        """Return it as `struct bpf_insn` in the machine's byte order."""
        return struct.pack("=BBhi", self.code, self.source << 4 | self.target, self.offset, self.value)


def deny(devices: Collection[Device]) -> list[Instruction]:
    """Return the program that denies these devices, at least one, and allows all others.

    >>> len(deny([Device(195, 0), Device(195, 1)]))
    12
    """
    by_major = [(major, sorted(group)) for major, group in groupby(sorted(set(devices)), key=lambda each: each.major)]
    body = 5
    allow = body + sum(1 + len(group) for _, group in by_major)
    reject = allow + 2
    program = [
        Instruction(LOAD_WORD, KIND, CONTEXT, ACCESS_TYPE),
        Instruction(AND, KIND, value=0xFFFF),
        Instruction(JUMP_UNEQUAL, KIND, offset=allow - 3, value=CHARACTER_DEVICE),
        Instruction(LOAD_WORD, MAJOR_OF, CONTEXT, MAJOR),
        Instruction(LOAD_WORD, MINOR_OF, CONTEXT, MINOR),
    ]
    for major, group in by_major:
        program.append(Instruction(JUMP_UNEQUAL, MAJOR_OF, offset=len(group), value=major))
        for device in group:
            program.append(Instruction(JUMP_EQUAL, MINOR_OF, offset=reject - len(program) - 1, value=device.minor))
    return [
        *program,
        Instruction(MOVE, RESULT, value=1),
        Instruction(EXIT),
        Instruction(MOVE, RESULT),
        Instruction(EXIT),
    ]
