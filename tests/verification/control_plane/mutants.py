"""Deliberately broken builds, which the checker must detect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

from google.protobuf.message import Message
from tests.verification.control_plane.faults import (
    LATE_PLAN_FAULTS,
    LOST_NODE_FAULTS,
    NEW_QUEUE_FAULTS,
    PAUSE_FAULTS,
    REPLACED_QUEUE_FAULTS,
    SICK_NODE_FAULTS,
    Faults,
)

from cotenant.history.checker import Rule
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.leadership.fenced_store import FencedStore
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.services.placement.api import server as placement
from cotenant.services.placement.cluster.committer import Committer
from cotenant.services.placement.cluster.live_records import Node
from cotenant.services.placement.planning import plan_runner
from cotenant.services.placement.planning.plan_runner import PlanRunner
from cotenant.services.placement.registry.node_removal import NodeRemoval
from cotenant.services.queue.api import server as queue
from cotenant.services.queue.api import submission
from cotenant.services.queue.api.follower_reads import QueueReader
from cotenant.services.queue.attempts import attempt_watcher
from cotenant.services.queue.jobs import job_arrays, job_store, launch_failures
from cotenant.services.queue.jobs.dependency_gate import DependencyGate
from cotenant.services.queue.jobs.job_store import IdempotencyKey, idempotency_key_of
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Committed, Compare, Conflict, Entry, Operation
from cotenant.v1 import job_pb2

Patch = tuple[object, str, object]


def accept_any_order(self: EpochFence, *_: object) -> bool:
    """An agent that compares neither terms nor epochs."""
    return True


def ignore_request_id(method: str, request_id: str, message: Message) -> IdempotencyKey:
    """A queue that recognizes no repeated request."""
    return idempotency_key_of(method, "", message)


async def transact_unfenced(
    self: FencedStore, compares: Sequence[Compare], operations: Sequence[Operation]
) -> Committed | Conflict:
    """A queue that writes without comparing its term."""
    return await self._store.transact(compares, operations)


_start = Committer.start


def start_unfenced(self: Committer, fence: Compare, revisions: dict[str, int]) -> None:
    """A placement whose fencing comparison always holds."""
    _start(self, Compare("nobody/leader", 0), revisions)


def no_leader_comparison(term: int) -> tuple[Compare, ...]:
    """A placement that accepts orders of any queue."""
    return ()


def no_job_comparison(job_id: str, revision: int, term: int) -> tuple[Compare, ...]:
    """A placement that starts a job whatever its current record says."""
    return ()


def no_idle_comparison(record: Record, entry: Entry | None) -> Compare:
    """A queue that ends a job without checking for live attempts."""
    return Compare("nobody/leader", 0)


def drop_wish(stored: records_pb2.StoredJob, wish: job_pb2.JobPhase.ValueType) -> bool:
    """A queue that acknowledges cancellations, and stores none."""
    return False


def ignore_dependencies(self: DependencyGate, record: Record) -> bool:
    """A queue whose jobs ignore their dependencies."""
    return True


def no_back_off(self: State, record: Record) -> bool:
    """A queue that retries failed jobs without back-off."""
    return False


def count_as_failure(job: job_pb2.Job, now: float) -> bool:
    """A queue that counts a refused launch as the job's failure."""
    return False


connected = property(lambda self: self.connected)  # whether a node accepts work, drained or not
_read = QueueReader._read


def read_stale(self: QueueReader, key: str) -> None:
    """A follower of the queue that misses ends since its last read."""
    ended = self._ended
    _read(self, key)
    self._ended = ended


_notify = State._notify


def notify_unless_ended(self: State, job_id: str) -> None:
    """A queue that does not report ends to watchers."""
    if job_id in self.records and not self.records[job_id].phase.ended:
        _notify(self, job_id)


class NothingEnding(Counter[str]):
    """A queue that ignores ending attempts."""

    def __contains__(self, key: object) -> bool:
        return False


def no_late_plans(self: PlanRunner, request: placement_pb2.PlanPlacementRequest) -> list[placement_pb2.Refused]:
    """A placement that accepts plans for attempts that are over."""
    return []


def no_earlier_requests(self: NodeRemoval, node_id: str) -> list[str]:
    """A placement that forgets a new node by a request about its predecessor."""
    return []


@dataclass(frozen=True, slots=True)
class Mutant:
    """A patch, the rule that it violates, faults that suit it, if any, and the first seed."""

    patches: tuple[Patch, ...]
    rule: Rule
    faults: Faults | None = None  # default: drawn by the seed
    first: int = 0


MUTANTS: dict[str, Mutant] = {
    "agents compare no terms and no epochs": Mutant(
        ((EpochFence, "raise_term", accept_any_order), (EpochFence, "raise_epoch", accept_any_order)),
        Rule.EPOCH,
        first=4,
    ),
    "the queue recognizes no repeated request": Mutant(
        ((queue, "idempotency_key_of", ignore_request_id), (submission, "idempotency_key_of", ignore_request_id)),
        Rule.ONCE,
    ),
    "the queue compares no term": Mutant(((FencedStore, "transact", transact_unfenced),), Rule.TERM, PAUSE_FAULTS, 3),
    "placement compares no term": Mutant(((Committer, "start", start_unfenced),), Rule.TERM, PAUSE_FAULTS, 31),
    "placement obeys any queue, and accepts late plans": Mutant(
        (
            (plan_runner, "leader_condition", no_leader_comparison),
            (placement, "leader_condition", no_leader_comparison),
            (PlanRunner, "_already_over", no_late_plans),
        ),
        Rule.LIFE,
        REPLACED_QUEUE_FAULTS,
        15,
    ),
    "placement starts a job without comparing its record": Mutant(
        ((plan_runner, "job_condition", no_job_comparison),), Rule.LIFE, LATE_PLAN_FAULTS
    ),
    "the queue ends a job without checking for live attempts": Mutant(
        ((job_store, "idle_condition", no_idle_comparison), (job_arrays, "idle_condition", no_idle_comparison)),
        Rule.LIFE,
        NEW_QUEUE_FAULTS,
        72,
    ),
    "the queue acknowledges cancellations without storing them": Mutant(
        ((queue, "cancel_or_suspend", drop_wish), (queue, "set_wish", drop_wish)), Rule.LOST
    ),
    "jobs ignore their dependencies": Mutant(((DependencyGate, "open", ignore_dependencies),), Rule.TURN),
    "failed jobs are retried without back-off": Mutant(((State, "backing_off", no_back_off),), Rule.TURN),
    "a refused launch fails its job": Mutant(
        ((launch_failures, "can_launch_elsewhere", count_as_failure),), Rule.PLATFORM, SICK_NODE_FAULTS
    ),
    "drained nodes accept work": Mutant(((Node, "open", connected),), Rule.TURN),
    "followers of the queue miss recent ends": Mutant(((QueueReader, "_read", read_stale),), Rule.READ),
    "watchers miss the ends of jobs": Mutant(((State, "_notify", notify_unless_ended),), Rule.READ),
    "the queue plans for jobs with an ending attempt, and placement starts them": Mutant(
        ((attempt_watcher, "Counter", NothingEnding), (plan_runner, "job_condition", no_job_comparison)),
        Rule.ONCE,
        first=23,
    ),
    "placement forgets a new node under the name of a forgotten one": Mutant(
        ((NodeRemoval, "past_request_ids", no_earlier_requests),), Rule.RESTART, LOST_NODE_FAULTS, 98
    ),
}


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Run a broken build."""
    with ExitStack() as stack:
        for target, attribute, value in MUTANTS[name].patches:
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield
