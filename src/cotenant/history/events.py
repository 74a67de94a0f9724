"""Events recorded at the edges of a mesh: commits of the store, answers to clients, actions of agents.

A history is a sequence of events in the order in which they happened. The changes of one transaction are one `Commit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.core.model.dependencies import Condition
from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase

Resource = tuple[str, str]  # node ID, and a core ("core 3") or GPU (its UUID) of it
Holds = Mapping[Resource, int]  # in thousandths


@dataclass(frozen=True, slots=True)
class JobPut:
    """The queue wrote a job. `request_ids` are the requests that created or changed it; `attempt` is 0 at first.

    It waits for jobs or arrays, each with a condition; and, after a failure, for a time on the commits'
    clock, or 0 if that is unknown.
    """

    job_id: str
    phase: Phase
    request_ids: tuple[str, ...] = ()
    attempt: int = 0
    priority: int = 0
    waits_for: tuple[tuple[str, Condition], ...] = ()
    not_before_seconds: float = 0.0
    failures: int = 0  # counted failures of its attempts, of any responsibility


@dataclass(frozen=True, slots=True)
class JobGone:
    """The queue deleted a job."""

    job_id: str


@dataclass(frozen=True, slots=True)
class AttemptPut:
    """Placement wrote an attempt: its ranks, out of `size`, and what it holds.

    `launch_cause` says why it was not launched, if it was not.
    """

    job_id: str
    number: int
    epoch: int
    state: AttemptState
    holds: Holds
    nodes: frozenset[str]
    ranks: tuple[int, ...]
    size: int
    launch_cause: LaunchCause | None = None
    elastic: tuple[int, int, int] | None = None  # of an elastic job: its minimum, its replicas, its maximum


@dataclass(frozen=True, slots=True)
class AttemptGone:
    """Placement deleted a job's attempt."""

    job_id: str


@dataclass(frozen=True, slots=True)
class NodePut:
    """Placement wrote a node, which accepts work or, because of an operator or its health, does not."""

    node_id: str
    takes_work: bool


@dataclass(frozen=True, slots=True)
class LeaderPut:
    """A process wrote a service's leader key: it leads, with the commit's revision as its term."""

    service: str
    identity: str


@dataclass(frozen=True, slots=True)
class LeaderGone:
    """A service's leader key was deleted with its lease."""

    service: str


Change = JobPut | JobGone | AttemptPut | AttemptGone | NodePut | LeaderPut | LeaderGone


@dataclass(frozen=True, slots=True)
class Commit:
    """The changes of one transaction, and when they happened, in seconds of any monotonic clock."""

    revision: int
    changes: tuple[Change, ...]
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Wrote:
    """A process committed a change of its service's records, whether or not it received the answer."""

    revision: int
    service: str
    identity: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A client received the answer that its request created a job."""

    request_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A client received the answer that a job is cancelled, or will be."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Prioritized:
    """The only client that changes a job's priority received the answer that it is changed."""

    job_id: str
    priority: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A client received a list of all jobs ended at a revision; it keeps calling the same replica."""

    client: str
    revision: int
    phases: Mapping[str, Phase]


@dataclass(frozen=True, slots=True)
class Watched:
    """A client that watches all jobs received an update; after its watch ends it starts another stream."""

    client: str
    stream: int
    job_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Welcomed:
    """An agent accepted a placement leader's term."""

    node_id: str
    term: int


@dataclass(frozen=True, slots=True)
class Told:
    """An agent read an order for a job, whether or not it obeyed."""

    node_id: str
    job_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Began:
    """An agent obeyed an assignment: an attempt's part runs on its node."""

    node_id: str
    job_id: str
    number: int
    epoch: int
    holds: Holds = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resized:
    """An agent obeyed a resize."""

    node_id: str
    job_id: str
    number: int
    epoch: int
    holds: Holds = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Over:
    """An attempt's part ended on a node; `superseded` if placement said that it should not be there."""

    node_id: str
    job_id: str
    number: int
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """An agent has lost its connection."""

    node_id: str
    at_seconds: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An operator requests that a node be given up, which may be obeyed until then, on the commits' clock."""

    node_id: str
    until_seconds: float


@dataclass(frozen=True, slots=True)
class Came:
    """An agent is connected again."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Rebooted:
    """A node lost everything that ran on it."""

    node_id: str


Event = (
    Commit
    | Wrote
    | Acknowledged
    | Cancelled
    | Prioritized
    | Listed
    | Watched
    | Welcomed
    | Told
    | Began
    | Resized
    | Over
    | Left
    | GivenUp
    | Came
    | Rebooted
)
