"""When to stop waiting for the answer to a transaction: once it is known that none will come.

Theory of operation. A member hands a transaction on to the cluster's leader. If that one dies with it, the transaction
is gone, and the member waits for several seconds for nothing; so does a caller whose member itself has stopped. Both
can be found out: the member tells of a later term of raft than the transaction was sent in, or it tells nothing while
another member has a leader. Then another call would be answered, and whoever can find out what became of this one, by
its request id or by the keys that it wrote, need not wait. Mere slowness is no reason: that looks alike to nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.store.etcd_connections import Member
from cotenant.store.etcd_members import Members
from cotenant.store.port import Unanswered

DOUBT_SECONDS = 1.5  # from when on it is looked whether an answer can still come
LOOK_SECONDS = 0.25
ANSWER_SECONDS = 1.5  # in which a member tells how it stands
GRACE_SECONDS = 0.5  # for an answer that is on its way


@asynccontextmanager
async def unless_lost(members: Members, asked: Sequence[Member]) -> AsyncIterator[None]:
    """Wait for the answer of the first member in `asked`.

    Raises:
        Unanswered: none will come, and another call would be answered.
    """
    looking: list[asyncio.Task[None]] = []
    limit = asyncio.timeout(None)
    raft_term = members.raft_term

    def look() -> None:
        looking.append(asyncio.create_task(_look(members, asked, raft_term, limit)))

    timer = asyncio.get_running_loop().call_later(DOUBT_SECONDS, look)
    try:
        async with limit:
            yield
    except TimeoutError:
        raise Unanswered(f"etcd at {asked[0].endpoint}: the transaction went with a member that is gone") from None
    finally:
        timer.cancel()
        for task in looking:
            task.cancel()


async def _look(members: Members, asked: Sequence[Member], raft_term: int, limit: asyncio.Timeout) -> None:
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
