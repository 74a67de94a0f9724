"""What can be recorded at the edges of a mesh: commits of the store, answers to clients, what agents heard and did.

A history is a sequence of these, in the order in which they happened. What one transaction changed is one `Commit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase

Thing = tuple[str, str]  # a node's id, and a core ("core 3") or GPU (its UUID) of it
Holds = Mapping[Thing, int]  # in thousandths


@dataclass(frozen=True, slots=True)
class JobPut:
    """The queue kept a job. `request_ids` are those under which it was made or changed; `attempt` is 0 before any.

    It waits for jobs or arrays, each with whether that has to succeed; and, after a failure, for a time, which is of
    the clock of the commits, or 0 where that is not known.
    """

    job_id: str
    phase: Phase
    request_ids: tuple[str, ...] = ()
    attempt: int = 0
    priority: int = 0
    waits_for: tuple[tuple[str, bool], ...] = ()
    not_before_seconds: float = 0.0
    failures: int = 0  # of its attempts that are counted, whoever is responsible


@dataclass(frozen=True, slots=True)
class JobGone:
    """The queue forgot a job."""

    job_id: str


@dataclass(frozen=True, slots=True)
class AttemptPut:
    """Placement kept an attempt: its ranks, out of `size` that belong to it, and what it holds.

    `launch_cause` says why it was not launched, where that is so.
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


@dataclass(frozen=True, slots=True)
class AttemptGone:
    """Placement forgot a job's attempt."""

    job_id: str


@dataclass(frozen=True, slots=True)
class NodePut:
    """Placement kept a node, which takes work or, for an operator's or its health's sake, does not."""

    node_id: str
    takes_work: bool


@dataclass(frozen=True, slots=True)
class LeaderPut:
    """A process wrote a service's leadership key: it leads, under the commit's revision as its term."""

    service: str
    identity: str


@dataclass(frozen=True, slots=True)
class LeaderGone:
    """A service's leadership key went with its lease."""

    service: str


Change = JobPut | JobGone | AttemptPut | AttemptGone | NodePut | LeaderPut | LeaderGone


@dataclass(frozen=True, slots=True)
class Commit:
    """What one transaction changed, and when, in seconds of any clock that goes on."""

    revision: int
    changes: tuple[Change, ...]
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Wrote:
    """A process was told, or would have been, that it committed a change of its service's records."""

    revision: int
    service: str
    identity: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A client was told that its request made a job."""

    request_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A client was told that a job is cancelled, or will be."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Prioritized:
    """The one client that changes a job's priority was told that it is so."""

    job_id: str
    priority: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A client was told of all jobs that had ended at a revision; it asked whom it had asked before."""

    client: str
    revision: int
    phases: Mapping[str, Phase]


@dataclass(frozen=True, slots=True)
class Watched:
    """A client that watches all jobs was told of one; it begins anew, with another stream, whenever its watch ends."""

    client: str
    stream: int
    job_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Welcomed:
    """An agent took a placement's term."""

    node_id: str
    term: int


@dataclass(frozen=True, slots=True)
class Told:
    """An agent read an order for a job, obeyed or not."""

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
    """An attempt's part ended on a node; `superseded` where placement said that it should not be there."""

    node_id: str
    job_id: str
    number: int
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """An agent has no connection any more, from now on."""

    node_id: str
    at_seconds: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An operator asks that a node be given up, which may be obeyed until then, on the clock of the commits."""

    node_id: str
    until_seconds: float


@dataclass(frozen=True, slots=True)
class Came:
    """An agent is connected again."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Rebooted:
    """A node lost all that ran on it."""

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
