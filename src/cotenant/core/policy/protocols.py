"""What policies promise. Each group is found through entry points; a policy is pure, seeded and columnar."""

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
from cotenant.core.policy.capabilities import able


@dataclass(frozen=True, slots=True)
class Order:
    """A level and a score for every active job; the lower runs first.

    `valid_seconds` says for how long nothing changes if nothing happens, so that nothing is recomputed for no reason.
    `over_share` marks jobs of tenants that have their fair share already, where the order knows of shares: if they
    wait, that is why. `given_up` marks waiting jobs that are not to run at all, such as those whose deadline cannot be
    met any more.
    """

    level: NDArray[np.int64]
    score: NDArray[np.float64]
    valid_seconds: float = math.inf
    over_share: NDArray[np.bool_] | None = None
    given_up: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ran to its end, as history has it: what it asked for, and what it attained."""

    gpu_milli: int
    cores: int
    replicas: int
    attained_seconds: float
    attained_gpu_seconds: float


class QueuePolicy(Protocol):
    """Orders active jobs.

    `preemptive`: running jobs that fall in the order make room. `strict`: a job that does not fit holds back all
    behind it. `running_first`: inside a level, jobs that run come before jobs that wait.
    """

    name: str
    api_version: int
    preemptive: bool
    strict: bool
    running_first: bool

    def order(self, jobs: Jobs, now: float) -> Order:
        """Give each active job its level and score."""


@runtime_checkable
class Learns(Protocol):
    """A queue policy that learns from history: told of every job that ended, oldest first, also after a restart."""

    def learn(self, ended: Ended) -> None:
        """Take one more end into account; the order may be another from then on."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Cores per replica for each role of a job, in the roles' order, and why, in one sentence."""

    cores: tuple[int, ...]
    reason: str


class CpuAllocator(Protocol):
    """Gives a job its cores."""

    name: str
    api_version: int

    def size(self, spec: JobSpec, estimate: Estimate, shapes: Sequence[NodeShape]) -> Sizing:
        """Decide the cores per replica of each role; never fewer than 1 for a process of a real job."""


class PlacementPolicy(Protocol):
    """Finds places for one gang, all or nothing."""

    name: str
    api_version: int

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer places for all replicas, or say why there are none. The ledger is left as it was."""


@runtime_checkable
class Discerns(Protocol):
    """A placement policy to which more than the needs of a gang matters, such as how long it has waited.

    Whoever runs cycles asks about one gang of those that are alike; without this protocol, gangs are alike that need
    the same. Where an answer changes with time alone, the refusal says when (`Refusal.holds_seconds`).
    """

    def alike(self, gang: Gang) -> Hashable:
        """Gangs for which this is equal get the same answer from the same ledger."""

    def alike_seconds(self, gang: Gang) -> float:
        """For how long that of a gang stays as it is while it waits with its places in fragments; infinity: for ever.

        Of a gang's waits, only `Gang.fragmented_seconds` may make a difference.
        """


def needs(gang: Gang) -> Hashable:
    """Tell what gangs are alike in to a policy that does not discern."""
    return gang.parts, gang.locality


def alike_by(policy: PlacementPolicy) -> Callable[[Gang], Hashable]:
    """Tell by what whoever asks a policy knows gangs that get the same answer; what they avoid always matters."""
    discerns = able(policy, Discerns)
    discerned = discerns.alike if discerns else needs

    def alike(gang: Gang) -> Hashable:
        like = discerned(gang)
        return (like, gang.avoided) if gang.avoided else like

    return alike


class Predictor(Protocol):
    """Turns observations into estimates with confidence."""

    name: str
    api_version: int

    def observe(self, observation: Observation) -> None:
        """Take in what was seen.

        Raises:
            ValueError: it cannot be, such as a negative rate; nothing of it was taken in.
        """

    def estimate(self, query: Query) -> Estimate:
        """Say what is known of a job; `predictable` False where that is nothing."""

    def dump(self) -> Mapping[str, bytes]:
        """What changed since the last dump, by key, to be kept across restarts; empty where a record was forgotten."""

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was kept, also what another replica kept since; names the records that could not be read."""


@runtime_checkable
class EstimatesMany(Protocol):
    """A predictor to whom many questions at once cost less than each by itself."""

    def estimate_many(self, queries: Sequence[Query]) -> Sequence[Estimate]:
        """Say of each job, in their order, what `estimate` would say."""


@runtime_checkable
class Forgets(Protocol):
    """A predictor that learns rates, and lets those go that no longer hold."""

    def forget_rates(self, like: Observation) -> None:
        """Let the rates of a kind of job go in its phase, on its GPU type and number of nodes: all as in `like`."""


@runtime_checkable
class Prepares(Protocol):
    """A predictor that fits something when it is asked after something was seen, and can do so before it is asked.

    What it says does not depend on whether it was: only how long it takes.
    """

    def prepare(self, fits_max: int) -> int:
        """Do at most so many of the fits that the next questions would wait for; tells how many are left."""


@runtime_checkable
class Follows(Protocol):
    """A predictor whose records cannot each be taken back by themselves, such as the parts of a model.

    Of others, `restore` is called whenever a record changed; one without content was forgotten.
    """

    def follow(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take in records that another replica wrote since; names those that could not be read."""


class Lesson(Protocol):
    """What there is to be learnt. It can be pickled, and so be learnt in another process."""

    def train(self) -> Any:
        """Learn: a pure function of the lesson, which may take a minute. What comes out can be pickled."""


@runtime_checkable
class Trains(Protocol):
    """A predictor that learns a model at times, which takes too long to be done between two estimates.

    Whoever runs it asks for a lesson after observations, lets it be learnt wherever there is time, and brings the
    model: the simulator at once, the service from a process beside it.
    """

    def lesson(self) -> Lesson | None:
        """Give what is to be learnt, where it is time for that; quick."""

    def adopt(self, model: Any) -> None:
        """Speak with what came of a lesson from now on; quick."""


@dataclass(frozen=True, slots=True)
class AttemptWindow:
    """What one attempt did in a window; None where the hardware or the job does not tell."""

    job_id: str
    number: int
    cpu_job: bool
    cores_used: float
    rate_per_second: float | None = None
    gpu_utilisation_percent: float | None = None
    memory_bandwidth_bytes_per_second: float | None = None
    cores: int = 0  # that it holds on the node; 0 where it is not told
    tasks: int = 1  # that it has on the node
    cache_bytes: float | None = None  # of the last-level cache
    throttle: Throttle = FREE  # how it is held back now
    best_effort: bool = False
    expected_rate_per_second: float | None = None  # what the predictor expects of it on what it holds
    phase: str = ""  # phases have rates of their own; "" is training
    unsteady: bool = False  # its rate may not be judged: it is being profiled, resized or has just begun
    cpu_some_percent: float | None = None  # of the time somebody in it waits for a CPU
    memory_some_percent: float | None = None  # the same for memory


@dataclass(frozen=True, slots=True)
class NodeWindow:
    """What a node saw in a window that ended at `now`."""

    node_id: str
    now: float
    seconds: float
    attempts: tuple[AttemptWindow, ...]
    cpu_some_percent: float = 0.0
    memory_some_percent: float = 0.0
    io_some_percent: float = 0.0
    memory_bandwidth_bytes_per_second: float | None = None
    memory_bandwidth_peak_bytes_per_second: float | None = None
    bandwidth_enforced: bool = False  # the hardware can hold an attempt to a share of the memory bandwidth
    cores_of_others: float = 0.0  # busy with what is of no attempt


@dataclass(frozen=True, slots=True)
class Directive:
    """The share of its full speed that an attempt may have: 0 suspends it, 1 frees it.

    With a `throttle` it says how, and the share is only told to people; without one, whoever carries it out finds a
    way to that share. `move` asks that the attempt goes on elsewhere. The victim is whom it is for, and its slowdown
    how far that is below its baseline, from 0 to 1.
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
        """Say what to do now; nothing where all is well."""
