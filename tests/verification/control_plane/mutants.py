"""Builds that are broken on purpose, to see that the checker finds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

from google.protobuf.message import Message
from tests.verification.control_plane.faults import (
    OF_LATE_PLANS,
    OF_LOST_NODES,
    OF_NEW_QUEUES,
    OF_REPLACED_QUEUES,
    OF_SICK_NODES,
    PAUSES,
    Faults,
)

from cotenant.history.checker import Rule
from cotenant.leadership.fenced_store import FencedStore
from cotenant.node_agent.control.epoch_fence import Fence
from cotenant.services.placement.api import server as placement
from cotenant.services.placement.cluster.committer import Committer
from cotenant.services.placement.cluster.live_records import Node
from cotenant.services.placement.planning import plan_runner
from cotenant.services.placement.planning.plan_runner import Planning
from cotenant.services.placement.registry.node_removal import Forgetting
from cotenant.services.queue.api import server as queue
from cotenant.services.queue.api.follower_reads import QueueReader
from cotenant.services.queue.attempts import attempt_watcher
from cotenant.services.queue.jobs import job_arrays, job_store, launch_failures
from cotenant.services.queue.jobs.dependency_gate import Gates
from cotenant.services.queue.jobs.job_store import Request, request_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.store.port import Committed, Compare, Conflict, Entry, Operation
from cotenant.v1 import job_pb2, records_pb2
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


def led_by_anybody(term: int) -> tuple[Compare, ...]:
    """A placement that does whatever any queue says."""
    return ()


def whatever_it_is(job_id: str, revision: int, term: int) -> tuple[Compare, ...]:
    """A placement that starts a job whatever has become of it."""
    return ()


def idle_anyway(record: Record, entry: Entry | None) -> Compare:
    """A queue that does not look what runs before it ends a job."""
    return Compare("nobody/leader", 0)


def heedless(stored: records_pb2.StoredJob, wish: job_pb2.JobPhase.ValueType) -> bool:
    """A queue that says that a job is cancelled, and keeps nothing of it."""
    return False


def always_open(self: Gates, record: Record) -> bool:
    """A queue that lets no job wait for others."""
    return True


def never_backs_off(self: State, record: Record) -> bool:
    """A queue that tries what failed again at once."""
    return False


def stays(job: job_pb2.Job, now: float) -> bool:
    """A queue that takes a launch that failed for the job's own failure."""
    return False


connected = property(lambda self: self.connected)  # of a node to which work is given although it is drained
_read = QueueReader._read


def read_once(self: QueueReader, key: str) -> None:
    """A queue that follows, and does not see that something has ended since it was last asked."""
    ended = self._ended
    _read(self, key)
    self._ended = ended


_tell = State._tell


def tell_of_the_living(self: State, job_id: str) -> None:
    """A queue that does not tell those who watch of ends."""
    if job_id in self.records and not self.records[job_id].phase.ended:
        _tell(self, job_id)


class Nothing(Counter[str]):
    """A queue that does not see what is ending."""

    def __contains__(self, key: object) -> bool:
        return False


def none_late(self: Planning, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Refused]:
    """A placement that remembers nothing that is over."""
    return []


def none_left(self: Forgetting, node_id: str) -> list[str]:
    """A placement that gives a new node up by the request that was about the one before it."""
    return []


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is changed, and which rule that breaks; which faults suit it, if any do, and from which seed on."""

    patches: tuple[Patch, ...]
    rule: Rule
    faults: Faults | None = None  # those that are drawn
    first: int = 0


MUTANTS: dict[str, Mutant] = {
    "agents compare no terms and no epochs": Mutant(
        ((Fence, "raise_term", obeys_all), (Fence, "raise_epoch", obeys_all)), Rule.EPOCH
    ),
    "the queue knows no request again": Mutant(((queue, "request_of", forgetful),), Rule.ONCE),
    "the queue compares no term": Mutant(((FencedStore, "transact", unfenced),), Rule.TERM, PAUSES, 3),
    "placement compares no term": Mutant(((Committer, "start", start_unfenced),), Rule.TERM, PAUSES, 26),
    "placement obeys any queue, and remembers nothing that is over": Mutant(
        (
            (plan_runner, "led_by", led_by_anybody),
            (placement, "led_by", led_by_anybody),
            (Planning, "_late", none_late),
        ),
        Rule.LIFE,
        OF_REPLACED_QUEUES,
    ),
    "placement starts a job whatever has become of it": Mutant(
        ((plan_runner, "as_known", whatever_it_is),), Rule.LIFE, OF_LATE_PLANS
    ),
    "the queue ends a job without a look at what runs": Mutant(
        ((job_store, "idle_by", idle_anyway), (job_arrays, "idle_by", idle_anyway)), Rule.LIFE, OF_NEW_QUEUES, 36
    ),
    "the queue says that jobs are cancelled, and keeps nothing of it": Mutant(
        ((queue, "hold_back", heedless), (queue, "want", heedless)), Rule.LOST
    ),
    "jobs wait for no others": Mutant(((Gates, "open", always_open),), Rule.TURN),
    "jobs that failed are tried again at once": Mutant(((State, "backing_off", never_backs_off),), Rule.TURN),
    "what a node could not launch fails its job": Mutant(
        ((launch_failures, "goes_elsewhere", stays),), Rule.PLATFORM, OF_SICK_NODES
    ),
    "nodes that are drained are given work": Mutant(((Node, "open", connected),), Rule.TURN),
    "a queue that follows does not see what has ended since": Mutant(((QueueReader, "_read", read_once),), Rule.READ),
    "whoever watches is not told of ends": Mutant(((State, "_tell", tell_of_the_living),), Rule.READ),
    "the queue plans for jobs whose attempt is ending, and placement starts them": Mutant(
        ((attempt_watcher, "Counter", Nothing), (plan_runner, "as_known", whatever_it_is)), Rule.ONCE
    ),
    "placement gives up whoever has come by the name of a node that was given up": Mutant(
        ((Forgetting, "requests_left", none_left),), Rule.RESTART, OF_LOST_NODES, 60
    ),
}


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Run a broken build."""
    with ExitStack() as stack:
        for target, attribute, value in MUTANTS[name].patches:
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield
