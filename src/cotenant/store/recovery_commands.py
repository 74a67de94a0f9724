"""Problems of a store that runs out of space, and the commands that fix them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cotenant.store.capacity import Capacity

SOON_SHARE = 0.05  # of an etcd's quota: a problem is reported that much before jobs are refused


@dataclass(frozen=True, slots=True)
class Recovery:
    """Why new jobs are refused, what to do, and the commands for it, in order."""

    problem: str
    remedy: str
    commands: tuple[str, ...] = ()


def recovery_of(capacity: Capacity) -> Recovery | None:
    """Return the problem and its remedy; None if there is enough space."""
    if capacity.path:
        problem = capacity.why_stopped()
        return _of_disk(capacity, problem) if problem else None
    problem = capacity.why_stopped(int(SOON_SHARE * capacity.limit_bytes))
    return _of_etcd(capacity, problem) if problem else None


def _of_etcd(capacity: Capacity, problem: str) -> Recovery:
    if capacity.full:
        return Recovery(
            f"{problem}; nothing can be written",
            "run these commands where etcdctl reaches etcd; the mesh then recovers. If etcd fills up again, "
            "restart its members with a larger --quota-backend-bytes, 8 GiB at most",
            (
                # Fails if that revision is already compacted, as the mesh compacts too: that is as good.
                f"{_etcdctl(capacity)} compact {capacity.revision} || true",
                *_defrag(capacity),
                f"{_etcdctl(capacity)} alarm disarm",
            ),
        )
    if capacity.fragmented_bytes:
        return Recovery(
            problem,
            "the mesh defragments members automatically once all of them are healthy; these commands do so now",
            tuple(_defrag(capacity)),
        )
    return Recovery(
        problem,
        "restart etcd's members with a larger --quota-backend-bytes, 8 GiB at most, or keep fewer ended jobs "
        "(`ended_jobs` and `ended_days` in the settings); see whose jobs take the most:",
        ("cotenant tenants",),
    )


def _etcdctl(capacity: Capacity, *endpoints: str) -> str:
    flags = "".join(f" {shlex.quote(flag)}" for flag in capacity.flags)
    return f"etcdctl --endpoints={','.join(endpoints or capacity.endpoints)}{flags}"


def _defrag(capacity: Capacity) -> Iterator[str]:
    """Yield one command for each member: a member answers nothing while it defragments."""
    for endpoint in capacity.endpoints:
        yield f"{_etcdctl(capacity, endpoint)} defrag"


def _of_disk(capacity: Capacity, problem: str) -> Recovery:
    folder = shlex.quote(str(Path(capacity.path).parent))
    return Recovery(
        problem,
        "free space on that file system, and keep jobs' directories on another one; the mesh then recovers. See "
        "what uses the space:",
        (f"df -h {folder}", f'du -xh "$(df --output=target {folder} | tail -n 1)" | sort -h | tail -n 20'),
    )
