"""The little program that says no to some character devices, in the kernel's own instructions (eBPF).

Version 2 has no files for devices: a program of type `BPF_PROG_TYPE_CGROUP_DEVICE` is attached to a group and asked
at each open and mknod within it. It gets `struct bpf_cgroup_dev_ctx {u32 access_type, major, minor}`, where the low
half of `access_type` is the kind of device, and answers 1 for yes and 0 for no [linux/bpf.h]. Several programs may be
attached along the path of a group; all of them must say yes.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import groupby
from typing import NamedTuple

CHARACTER_DEVICE = 2  # BPF_DEVCG_DEV_CHAR
ACCESS_TYPE, MAJOR, MINOR = 0, 4, 8  # where each stands in what the program gets
ANSWER, GOT, KIND, MAJOR_OF, MINOR_OF = range(5)  # registers: r0 is the answer, r1 points to what it gets

LOAD_WORD = 0x61  # BPF_LDX | BPF_MEM | BPF_W
AND = 0x57  # BPF_ALU64 | BPF_AND | BPF_K
MOVE = 0xB7  # BPF_ALU64 | BPF_MOV | BPF_K
JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_UNEQUAL = 0x55  # BPF_JMP | BPF_JNE | BPF_K
EXIT = 0x95  # BPF_JMP | BPF_EXIT


class Device(NamedTuple):
    """A character device, by its numbers."""

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
        """As `struct bpf_insn` has it, in this machine's order of bytes."""
        return struct.pack("=BBhi", self.code, self.source << 4 | self.target, self.offset, self.value)


def deny(devices: Collection[Device]) -> list[Instruction]:
    """Write the program that says no to these and yes to all else; at least one is given.

    >>> len(deny([Device(195, 0), Device(195, 1)]))
    12
    """
    by_major = [(major, sorted(group)) for major, group in groupby(sorted(set(devices)), key=lambda each: each.major)]
    body = 5
    yes = body + sum(1 + len(group) for _, group in by_major)
    no = yes + 2
    program = [
        Instruction(LOAD_WORD, KIND, GOT, ACCESS_TYPE),
        Instruction(AND, KIND, value=0xFFFF),
        Instruction(JUMP_UNEQUAL, KIND, offset=yes - 3, value=CHARACTER_DEVICE),
        Instruction(LOAD_WORD, MAJOR_OF, GOT, MAJOR),
        Instruction(LOAD_WORD, MINOR_OF, GOT, MINOR),
    ]
    for major, group in by_major:
        program.append(Instruction(JUMP_UNEQUAL, MAJOR_OF, offset=len(group), value=major))
        for device in group:
            program.append(Instruction(JUMP_EQUAL, MINOR_OF, offset=no - len(program) - 1, value=device.minor))
    return [
        *program,
        Instruction(MOVE, ANSWER, value=1),
        Instruction(EXIT),
        Instruction(MOVE, ANSWER),
        Instruction(EXIT),
    ]
