"""Project quotas: a limit on the size of a directory, on XFS mounted with `prjquota` and on ext4 with its feature.

What is made in a directory inherits the directory's project, whose blocks the kernel counts and limits: quotactl_fd(2),
and the ioctl FS_IOC_FSSETXATTR of <linux/fs.h>. The project's number is made from the directory's inode, which no other
directory of the file system has at the same time, so there is nothing to keep.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUOTACTL_FD = 443  # on all architectures, since Linux 5.14
PROJECTS = 2  # PRJQUOTA
GET_QUOTA, SET_QUOTA, GET_STATE = 0x800007, 0x800008, 0x5805  # Q_GETQUOTA, Q_SETQUOTA, Q_XGETQSTAT
PROJECTS_LIMITED = 1 << 5  # FS_QUOTA_PDQ_ENFD
SPACE_LIMITS = 1  # QIF_BLIMITS
FIRST_PROJECT = 1 << 31  # operators number theirs from 1
BLOCK_BYTES = 1024
_QUOTA = struct.Struct("=8QI4x")  # if_dqblk
_STATE = struct.Struct("=bxH252x")  # the begin of fs_quota_stat
_ATTRIBUTES = struct.Struct("=5I8x")  # fsxattr
GET_ATTRIBUTES, SET_ATTRIBUTES = 0x801C581F, 0x401C5820  # FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR
INHERIT = 0x200  # FS_XFLAG_PROJINHERIT

_libc = ctypes.CDLL(None, use_errno=True)


def enforced(directory: Path) -> bool:
    """Return whether the directory's file system limits projects. Blocks."""
    try:
        with _opened(directory) as descriptor:
            _, flags = _STATE.unpack(_quotactl(descriptor, GET_STATE, 0, bytes(_STATE.size)))
    except OSError:
        return False
    return bool(flags & PROJECTS_LIMITED)


def limit(directory: Path, limit_bytes: int) -> None:
    """Limit the size of an empty directory with all that will be in it. Blocks.

    Raises:
        OSError: the kernel refuses, or has another limit than it was given.
    """
    blocks = -(-limit_bytes // BLOCK_BYTES)
    with _opened(directory) as descriptor:
        project = FIRST_PROJECT + os.fstat(descriptor).st_ino % (FIRST_PROJECT - 1)
        wanted = _QUOTA.pack(blocks, 0, 0, 0, 0, 0, 0, 0, SPACE_LIMITS)
        _quotactl(descriptor, SET_QUOTA, project, wanted)
        if (found := _QUOTA.unpack(_quotactl(descriptor, GET_QUOTA, project, bytes(_QUOTA.size)))[0]) != blocks:
            raise OSError(f"the limit of {directory} is {found} KiB, not {blocks} KiB")
        flags, *others = _ATTRIBUTES.unpack(fcntl.ioctl(descriptor, GET_ATTRIBUTES, bytes(_ATTRIBUTES.size)))
        others[2] = project
        fcntl.ioctl(descriptor, SET_ATTRIBUTES, _ATTRIBUTES.pack(flags | INHERIT, *others))


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _quotactl(descriptor: int, command: int, project: int, content: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(content, len(content))
    arguments = ctypes.c_long(QUOTACTL_FD), ctypes.c_uint(descriptor), ctypes.c_uint(command << 8 | PROJECTS)
    if _libc.syscall(*arguments, ctypes.c_uint(project), buffer):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return buffer.raw
