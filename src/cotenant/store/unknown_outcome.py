"""Decides when to stop waiting for the answer to a transaction: once it is known that none will come.

Theory of operation. A member forwards a transaction to the cluster's leader. If the leader dies with it, the
transaction is lost, and the member waits for several seconds in vain; so does a caller whose member itself has stopped.
Both can be detected: the member reports a later raft term than the one in which the transaction was sent, or it does
not answer while another member has a leader. Then another call would be answered, and a caller that can find out what
became of the transaction, by its request ID or by the keys that it wrote, need not wait. Slowness alone is no reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.store.etcd_connections import Member
from cotenant.store.etcd_members import EtcdMembers
from cotenant.store.port import UnknownOutcome

PROBE_AFTER_SECONDS = 1.5  # after which the members are probed
LOOK_SECONDS = 0.25
ANSWER_SECONDS = 1.5  # for a member's status
GRACE_SECONDS = 0.5  # for an answer in transit


@asynccontextmanager
async def unless_outcome_lost(members: EtcdMembers, asked: Sequence[Member]) -> AsyncIterator[None]:
    """Wait for the answer of the first member in `asked`.

    Raises:
        UnknownOutcome: no answer will come, and another call would be answered.
    """
    looking: list[asyncio.Task[None]] = []
    limit = asyncio.timeout(None)
    raft_term = members.raft_term

    def look() -> None:
        looking.append(asyncio.create_task(_look(members, asked, raft_term, limit)))

    timer = asyncio.get_running_loop().call_later(PROBE_AFTER_SECONDS, look)
    try:
        async with limit:
            yield
    except TimeoutError:
        raise UnknownOutcome(f"etcd at {asked[0].endpoint}: the transaction was lost with a failed member") from None
    finally:
        timer.cancel()
        for task in looking:
            task.cancel()


async def _look(members: EtcdMembers, asked: Sequence[Member], raft_term: int, limit: asyncio.Timeout) -> None:
    while True:
        everybody = list(members)
        told = dict(zip(everybody, await asyncio.gather(*map(_status, everybody)), strict=True))
        members.raft_term = max([members.raft_term, *(status.raftTerm for status in told.values() if status)])
        if asked and _is_lost(told, asked[0], raft_term):
            if told[asked[0]] is None:
                members.leave(asked[0])
            limit.reschedule(asyncio.get_running_loop().time() + GRACE_SECONDS)
            return
        await asyncio.sleep(LOOK_SECONDS)


def _is_lost(told: dict[Member, Any], member: Member, raft_term: int) -> bool:
    led = {each for each, status in told.items() if status and status.leader}
    if told.get(member) is None:
        return bool(led)
    return member in led and 0 < raft_term < told[member].raftTerm


async def _status(member: Member) -> Any:
    try:
        return await member.maintenance.Status(rpc.StatusRequest(), timeout=ANSWER_SECONDS)
    except rpc.AioRpcError:
        return None
