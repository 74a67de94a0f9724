"""The policy API: the protocols that policies implement. Policies are found through entry points and are pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.estimate import Estimate, Observation, Query
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_table import Jobs
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.throttle import FREE as FREE
from cotenant.core.model.throttle import Throttle as Throttle
from cotenant.core.policy.capabilities import capability_of


@dataclass(frozen=True, slots=True)
class Order:
    """A level and a score for every active job; the lower runs first.

    `valid_seconds` is how long the order stays valid if nothing happens, so that it is not recomputed without need.
    `over_share` marks jobs of tenants that already hold their fair share, if the order considers shares: if these jobs
    wait, that is why. `given_up` marks waiting jobs that must not run at all, such as jobs that can no longer meet
    their deadline. `votes` returns what a row's level and score were made of, by name: numbers for a reader, computed
    only when somebody asks. It is called on the thread that called `order`, later, and must not change anything.
    """

    level: NDArray[np.int64]
    score: NDArray[np.float64]
    valid_seconds: float = math.inf
    over_share: NDArray[np.bool_] | None = None
    given_up: NDArray[np.bool_] | None = None
    votes: Callable[[int], Mapping[str, float]] | None = None


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that ran to its end, as kept in history: what it asked for, what it attained, and what was predicted.

    `predicted_seconds` is the last prediction of its total run time before the end, None if there was none, with its
    confidence from 0 to 1.
    """

    gpu_milli: int
    cores: int
    replicas: int
    attained_seconds: float
    attained_gpu_seconds: float
    predicted_seconds: float | None = None
    confidence: float = 0.0


class QueuePolicy(Protocol):
    """Orders active jobs.

    `preemptive`: running jobs that fall in the order make room. `strict`: a job that does not fit holds back all jobs
    behind it. `running_first`: within a level, running jobs come before waiting jobs.
    """

    name: str
    api_version: int
    preemptive: bool
    strict: bool
    running_first: bool

    def order(self, jobs: Jobs, now: float) -> Order:
        """Return each active job's level and score."""


@runtime_checkable
class FixedWhileWaiting(Protocol):
    """A queue policy whose order of the waiting jobs changes only where one of them comes or goes.

    It judges each job by its own row alone, gives a waiting job the same level and score for as long as the row stays
    the same, and marks none as given up or over its share. How long its order stays valid depends on the running jobs
    alone. A cycle then orders the running jobs and the first waiting jobs of each class, not all of them
    (`core.scheduling.waiting_order`).
    """

    @property
    def fixed_while_waiting(self) -> bool:
        """Whether all this holds, which may depend on the policy's options."""


@runtime_checkable
class Learns(Protocol):
    """A queue policy that learns from history: it gets every job that ended, oldest first, also after restarts."""

    def learn(self, ended: EndedJob) -> None:
        """Learn from one more job that ended; the order may change from then on."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Cores per replica for each role of a job, in the order of its roles, and the reason in one sentence."""

    cores: tuple[int, ...]
    reason: str


class CpuAllocator(Protocol):
    """Decides the cores of jobs."""

    name: str
    api_version: int

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Return the cores per replica of each role; at least 1 for a process of a real job."""


class PlacementPolicy(Protocol):
    """Finds places for one gang, all or nothing."""

    name: str
    api_version: int

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Return places for all replicas, or why there are none. Leaves the ledger unchanged."""


@runtime_checkable
class DefinesEquivalence(Protocol):
    """A placement policy for which more than a gang's requirements matters, such as how long it has waited.

    A cycle asks about one gang of each equivalence class; without this protocol, gangs with the same requirements are
    equivalent. If an answer changes with time alone, the refusal says when (`Refusal.holds_seconds`).
    """

    def equivalence_key(self, gang: Gang) -> Hashable:
        """Return a key; gangs with equal keys get the same answer from the same ledger."""

    def equivalence_seconds(self, gang: Gang) -> float:
        """Return for how long a gang keeps its key while it waits with resources fragmented; infinity: forever.

        Of a gang's waits, only `Gang.fragmented_seconds` may change the key.
        """


@runtime_checkable
class LeavesOutScorers(Protocol):
    """A placement policy of scorers that leaves out a scorer with a fault instead of failing."""

    def take_scorer_faults(self) -> Mapping[str, str]:
        """Return the scorers left out since the last call, each with its fault; they are used again from now on."""


def default_equivalence_key(gang: Gang) -> Hashable:
    """Return the key of a gang for policies that do not define one: its requirements."""
    return (gang.parts, gang.locality, gang.constraints) if gang.constraints else (gang.parts, gang.locality)


def equivalence_key_by(policy: PlacementPolicy) -> Callable[[Gang], Hashable]:
    """Return a policy's function from gangs to equivalence keys; constraints and nodes to avoid are always part."""
    discerns = capability_of(policy, DefinesEquivalence)
    discerned = discerns.equivalence_key if discerns else default_equivalence_key

    def equivalence_key(gang: Gang) -> Hashable:
        like = discerned(gang)
        return (like, gang.avoided, gang.constraints) if gang.avoided or gang.constraints else like

    return equivalence_key


class Predictor(Protocol):
    """Turns observations into estimates with confidence."""

    name: str
    api_version: int

    def observe(self, observation: Observation) -> None:
        """Learn from an observation.

        Raises:
            ValueError: the observation is invalid, such as a negative rate; nothing was learned from it.
        """

    def estimate(self, query: Query) -> Estimate:
        """Return what is known about a job; `predictable` is False if that is nothing."""

    def dump(self) -> Mapping[str, bytes]:
        """Return what changed since the last dump, by key, to be persisted; empty for a record that was forgotten."""

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore records, including those that another replica wrote; returns the records that could not be read."""


@runtime_checkable
class EstimatesMany(Protocol):
    """A predictor for which many queries at once cost less than one by one."""

    def estimate_many(self, queries: Sequence[Query]) -> Sequence[Estimate]:
        """Return for each job, in order, what `estimate` would return."""


@runtime_checkable
class Forgets(Protocol):
    """A predictor that learns rates and discards those that no longer hold."""

    def forget_rates(self, like: Observation) -> None:
        """Discard the rates of a job class in its phase, on its GPU type and number of nodes: all as in `like`."""


@runtime_checkable
class Prepares(Protocol):
    """A predictor that fits a model when queried after new observations, and can do so in advance.

    Its answers do not depend on whether it did: only the time they take.
    """

    def prepare(self, fits_max: int) -> int:
        """Do at most this many of the fits that the next queries need; returns how many are left."""


@runtime_checkable
class Follows(Protocol):
    """A predictor whose records cannot be restored one by one, such as the parts of a model.

    Other predictors get `restore` whenever a record changes; a record without content was forgotten.
    """

    def follow(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Apply records that another replica has written since; returns those that could not be read."""


class TrainingTask(Protocol):
    """A training task. It can be pickled, and so run in another process."""

    def train(self) -> Any:
        """Train: a pure function of the task, which may take a minute. The result can be pickled."""


@runtime_checkable
class Trains(Protocol):
    """A predictor that trains a model now and then, which takes too long between two estimates.

    Its host asks for a training task after observations, runs it where there is time, and hands back the model: the
    simulator at once, the service from a process beside it.
    """

    def training_task(self) -> TrainingTask | None:
        """Return a training task if it is time for one; quick."""

    def adopt(self, model: Any) -> None:
        """Use a trained model from now on; quick."""


@dataclass(frozen=True, slots=True)
class AttemptWindow:
    """What one attempt did in a window; None for what the hardware or the job does not report."""

    job_id: str
    number: int
    cpu_job: bool
    cores_used: float
    rate_per_second: float | None = None
    gpu_utilisation_percent: float | None = None
    memory_bandwidth_bytes_per_second: float | None = None
    cores: int = 0  # held on the node; 0 if unknown
    tasks: int = 1  # on the node
    cache_bytes: float | None = None  # of the last-level cache
    throttle: Throttle = FREE  # its present throttle
    best_effort: bool = False
    expected_rate_per_second: float | None = None  # the predictor's estimate on its present allocation
    phase: str = ""  # rates differ by phase; "" is training
    steady: bool = True  # its rate may be judged: it is not being profiled or resized, and has not just started
    cpu_some_percent: float | None = None  # of the time in which some task waits for a CPU
    memory_some_percent: float | None = None  # the same for memory


@dataclass(frozen=True, slots=True)
class NodeWindow:
    """What was measured on a node in a window that ended at `now`."""

    node_id: str
    now: float
    seconds: float
    attempts: tuple[AttemptWindow, ...]
    cpu_some_percent: float = 0.0
    memory_some_percent: float = 0.0
    io_some_percent: float = 0.0
    memory_bandwidth_bytes_per_second: float | None = None
    memory_bandwidth_peak_bytes_per_second: float | None = None
    bandwidth_enforced: bool = False  # the hardware can limit an attempt's memory bandwidth
    cores_of_others: float = 0.0  # busy with processes of no attempt


@dataclass(frozen=True, slots=True)
class Directive:
    """The share of its full speed that an attempt may have: 0 suspends it, 1 releases it.

    A `throttle` says how to reach that share, and then the share is only for display; without a throttle, the runtime
    chooses how. `move` requests a migration. The victim is the job that the directive protects, and its slowdown is how
    far that job is below its baseline, from 0 to 1.
    """

    job_id: str
    number: int
    share: float
    reason: str
    throttle: Throttle | None = None
    move: bool = False
    victim_job_id: str = ""
    victim_slowdown: float = 0.0


class ContentionPolicy(Protocol):
    """Turns a node's window of samples into directives."""

    name: str
    api_version: int

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Return what to do now; empty if nothing is contended."""
