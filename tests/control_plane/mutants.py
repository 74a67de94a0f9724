"""Builds that are broken on purpose, to see that the checker finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

from google.protobuf.message import Message

from cotenant.node_agent.fence import Fence
from cotenant.replicas.stores import FencedStore
from cotenant.services.placement import planning
from cotenant.services.placement import server as placement
from cotenant.services.placement.committer import Committer
from cotenant.services.placement.planning import Planning
from cotenant.services.queue import follower
from cotenant.services.queue import server as queue
from cotenant.services.queue.keeper import Request, request_of
from cotenant.store.port import Committed, Compare, Conflict, Operation
from cotenant.v1 import placement_service_pb2 as placement_pb2

Patch = tuple[object, str, object]


def obeys_all(self: Fence, *_: object) -> bool:
    """An agent that compares no terms and no epochs."""
    return True


def forgetful(method: str, request_id: str, message: Message) -> Request:
    """A queue that knows no request again."""
    return request_of(method, "", message)


async def unfenced(
    self: FencedStore, compares: Sequence[Compare], operations: Sequence[Operation]
) -> Committed | Conflict:
    """A queue that writes without comparing its term."""
    return await self._store.transact(compares, operations)


_start = Committer.start


def start_unfenced(self: Committer, fence: Compare, revisions: dict[str, int]) -> None:
    """A placement that compares something that is always so."""
    _start(self, Compare("nobody/leader", 0), revisions)


def led_by_anybody(term: int) -> None:
    """A placement that does whatever any queue says."""


class Nothing(Counter[str]):
    """A queue that does not see what is ending."""

    def __contains__(self, key: object) -> bool:
        return False


def none_late(self: Planning, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Refused]:
    """A placement that remembers nothing that is over."""
    return []


MUTANTS: dict[str, tuple[Patch, ...]] = {
    "no comparison of terms and epochs in agents": (
        (Fence, "raise_term", obeys_all),
        (Fence, "raise_epoch", obeys_all),
    ),
    "no idempotency in the queue": ((queue, "request_of", forgetful),),
    "no fence in the queue": ((FencedStore, "transact", unfenced),),
    "no fence in placement": ((Committer, "start", start_unfenced),),
    "no comparison of the queue's term where attempts are started": ((planning, "led_by", led_by_anybody),),
    "no comparison of the queue's term where attempts are forgotten": ((placement, "led_by", led_by_anybody),),
    "no memory of attempts that are over": ((Planning, "_late", none_late),),
    "plans for jobs whose attempt is ending": ((follower, "Counter", Nothing),),
}


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Run a broken build."""
    with ExitStack() as stack:
        for target, attribute, value in MUTANTS[name]:
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield
