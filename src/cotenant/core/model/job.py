"""Job specifications: what a user wants to run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from cotenant.core.model.dependencies import Dependency
from cotenant.core.model.job_array import ArraySpec, ArrayTask
from cotenant.core.model.loss_goal import NO_GOAL, LossGoal
from cotenant.core.model.mounts import Mount
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.model.notification import Trigger
from cotenant.core.model.resources import WHOLE_GPU_MILLI as WHOLE_GPU_MILLI
from cotenant.core.model.resources import Amounts, Resources, added, amounts_of
from cotenant.core.model.secrets import SecretUse

GRACE_SECONDS_DEFAULT = 30.0
SUBMIT_VARIABLES = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")  # of the submitter's shell
OPEN_REPLICAS_MAX_DEFAULT = 64  # of a service with `auto` replicas and no limit
TENANT_DEFAULT = "default"
QUEUE_DEFAULT = "default"


class JobKind(StrEnum):
    """The kind of work that a job does."""

    TRAINING = "training"
    INFERENCE = "inference"
    CPU = "cpu"


class Locality(StrEnum):
    """How close together a gang must be placed (Philly, section 3.1 [P])."""

    SERVER = "server"
    RACK = "rack"
    ANYWHERE = "anywhere"


class SpreadBy(StrEnum):
    """What a job's replicas are spread over."""

    NODE = "node"
    RACK = "rack"


class ObjectiveCheck(StrEnum):
    """What happens at submission to a job whose objectives cannot be kept, by the forecast of that moment."""

    REQUIRE = "require"  # it is refused
    WARN = "warn"  # it is accepted with a warning
    IGNORE = "ignore"  # nothing is forecast


class ResizeMode(StrEnum):
    """How an elastic job takes up another number of replicas."""

    RESTART = "restart"  # it is stopped with its grace, and starts again from what it saved
    IN_PLACE = "in-place"  # its processes go on, and replicas join or leave them


class BatchScaling(StrEnum):
    """What an elastic job's replicas do with the batch."""

    STRONG = "strong"  # all replicas together have the same batch, whatever their number
    WEAK = "weak"  # each replica has the same batch


@dataclass(frozen=True, slots=True)
class Spread:
    """Anti-affinity: a job's replicas are on `least` different nodes or racks at least; 0: anywhere."""

    by: SpreadBy | None = None  # None: nodes
    least: int = 0


NO_SPREAD = Spread()


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a job's processes; without an image they run in none."""

    image: str = ""
    mounts: tuple[Mount, ...] = ()


NO_CONTAINER = Container()


@dataclass(frozen=True, slots=True)
class Request(Amounts):
    """What one replica asks for. `cores` None is `auto`: the CPU allocator decides."""

    gpu_milli: int = 0
    cores: int | None = None
    gpu_type: str = ""

    def resources(self, *, auto: int) -> Resources:
        """Return it as a vector; `auto` is the number of cores where the allocator decides."""
        return Resources(self.gpu_milli, auto if self.cores is None else self.cores, **amounts_of(self))


@dataclass(frozen=True, slots=True)
class OpenReplicas:
    """The range within which a service's number of replicas is chosen (`auto`)."""

    least: int = 1
    most: int = OPEN_REPLICAS_MAX_DEFAULT


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """The numbers of replicas that a role of an elastic training job may have.

    >>> str(ReplicaRange(1, 8))
    '1..8'
    """

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


@dataclass(frozen=True, slots=True)
class Role:
    """A group of identical replicas: workers, parameter servers.

    With `open` set, `replicas` is the number chosen last, and before the first choice the minimum. With `elastic` set,
    it is the number at the start of the job's present generation.
    """

    name: str = "worker"
    replicas: int = 1
    request: Request = Request()
    command: tuple[str, ...] = ()
    open: OpenReplicas | None = None
    elastic: ReplicaRange | None = None


@dataclass(frozen=True, slots=True)
class Qos:
    """A job's objectives; 0 means that there is none."""

    rate_min_per_second: float = 0.0
    latency_seconds: float = 0.0
    latency_percentile: float = 0.0
    arrivals_per_second: float = 0.0


class EnvironmentSource(StrEnum):
    """Where a job's Python environment was found at its submission."""

    VENV = "venv"  # VIRTUAL_ENV
    CONDA = "conda"  # CONDA_PREFIX
    UV = "uv"  # a `.venv` that uv made in the submitter's folder


class EnvironmentChoice(StrEnum):
    """Which Python environment of the submitter's shell a job gets."""

    AUTO = "auto"  # the one that is found, where a node has the submitter's folder
    VENV = "venv"
    CONDA = "conda"
    UV = "uv"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PythonEnvironment:
    """The submitter's Python environment. `requested`: every node needs it, not only those with the folder."""

    source: EnvironmentSource | None  # None: from a newer version
    path: str
    interpreter: str
    requested: bool = False


@dataclass(frozen=True, slots=True)
class SubmitDirectory:
    """The folder that a job was submitted from, and the search path there.

    A node has the same folder where path, inode and owner are equal: on the same machine, or on a shared file system.
    """

    path: str
    inode: int
    owner_uid: int
    environment: tuple[tuple[str, str], ...] = ()  # of SUBMIT_VARIABLES


@dataclass(frozen=True, slots=True, weakref_slot=True)
class JobSpec:
    """A job as its user described it, with every default filled in."""

    name: str = ""
    kind: JobKind = JobKind.TRAINING
    tenant: str = TENANT_DEFAULT
    queue: str = QUEUE_DEFAULT
    roles: tuple[Role, ...] = ()
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    working_directory: str = ""
    model: str = ""
    steps_total: int = 0
    deadline_seconds: float | None = None  # unix time
    qos: Qos = Qos()
    priority: int = 0
    preemptible: bool = True
    grace_seconds: float = GRACE_SECONDS_DEFAULT
    warning_signal: str = "SIGTERM"
    retries_max: int = 0
    locality: Locality | None = None
    progress_regex: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    expected_seconds: float | None = None
    loss_goal: LossGoal = NO_GOAL
    profiled: bool = True  # whether its cores may be reduced for a while to measure how many it needs
    dependencies: tuple[Dependency, ...] = ()
    array: ArraySpec | None = None  # only at submission
    array_task: ArrayTask | None = None
    best_effort: bool = False  # uses leftover CPU time: it may be throttled by time, not only by cores
    stop_after_disconnected_seconds: float | None = None  # None: it runs on without the control plane
    pre_run_seconds: float | None = None  # rank 0 first runs alone on one GPU for at most this long; None: no pre-run
    pids_max: int = 0  # per task; 0: the node's own limit
    submit_directory: SubmitDirectory | None = None  # processes start there where a node has it
    spread: Spread = NO_SPREAD
    objective_check: ObjectiveCheck | None = None  # None: warn
    time_limit_seconds: float | None = None  # of one attempt, including the grace; None: no limit
    notify: tuple[str, ...] = ()  # targets; of a job that was accepted, redacted to their hosts
    notify_on: tuple[Trigger, ...] = ()  # () means once it has ended
    hold: bool = False  # suspended from the start
    begin_seconds: float | None = None  # unix time before which it does not start
    resize: ResizeMode | None = None  # None: by a restart
    scale: BatchScaling | None = None  # None: strong
    upload: str = ""  # id of the uploaded folder in which it starts; of a draft, the path of a folder to upload
    python_environment: PythonEnvironment | None = None  # whose variables are in `environment` or `submit_directory`
    container: Container = NO_CONTAINER
    secrets: tuple[SecretUse, ...] = ()  # of its tenant; names only

    @property
    def gpu_milli(self) -> int:
        """GPUs over all replicas, in thousandths."""
        return sum(role.replicas * role.request.gpu_milli for role in self.roles)

    def resources(self, *, auto: int) -> Resources:
        """Return the resources over all replicas; `auto` is the number of cores where the allocator decides."""
        return added([role.request.resources(auto=auto) * role.replicas for role in self.roles])

    @property
    def replicas(self) -> int:
        """Processes over all roles."""
        return sum(role.replicas for role in self.roles)

    @property
    def open(self) -> OpenReplicas | None:
        """The range of its `auto` replicas; None if the user gave the number."""
        return self.roles[0].open if len(self.roles) == 1 else None

    @property
    def elastic(self) -> bool:
        """Whether the number of replicas of a role may change while it runs."""
        return any(role.elastic for role in self.roles)

    @property
    def elastic_role(self) -> int | None:
        """The number of the role that is resized: the first that has a range of replicas; None of a rigid job."""
        return next((number for number, role in enumerate(self.roles) if role.elastic), None)

    def with_elastic_replicas(self, count: int) -> JobSpec:
        """Return the same elastic job with this number of replicas in its elastic role.

        >>> JobSpec(roles=(Role("ps"), Role("worker", 2, elastic=ReplicaRange(1, 8)))).with_elastic_replicas(5).replicas
        6
        """
        return self.with_counts(
            count if number == self.elastic_role else role.replicas for number, role in enumerate(self.roles)
        )

    def without_folder(self) -> JobSpec:
        """Return the same job without the submitter's folder, and without what is used only there."""
        environment = self.python_environment
        kept = environment if environment and environment.requested else None
        return replace(self, submit_directory=None, python_environment=kept)

    def with_replicas(self, count: int) -> JobSpec:
        """Return the same job with this number of replicas in its only role.

        >>> JobSpec(roles=(Role(open=OpenReplicas(2, 8)),)).with_replicas(3).replicas
        3
        """
        return replace(self, roles=(replace(self.roles[0], replicas=count),))

    def with_counts(self, counts: Iterable[int]) -> JobSpec:
        """Return the same job with these numbers of replicas, one for each role.

        >>> JobSpec(roles=(Role("ps"), Role("worker", 2))).with_counts([1, 5]).replicas
        6
        """
        numbered = zip(self.roles, counts, strict=True)
        return replace(self, roles=tuple(replace(role, replicas=count) for role, count in numbered))

    @property
    def needs(self) -> tuple[Capability, ...]:
        """What it needs of the executors of its nodes."""
        wanted = ((self.upload, Capability.FOLDERS), (self.secrets, Capability.SECRETS))
        return tuple(capability for given, capability in wanted if given)

    @property
    def shape(self) -> Shape:
        """What decides where the job fits: two jobs of the same shape are refused for the same reasons.

        A job that may be preempted may borrow what others may not.
        """
        roles = tuple((role.name, role.replicas, role.request) for role in self.roles)
        return roles, self.locality, self.spread, self.preemptible, bool(self.container.image), self.needs


Shape = tuple[tuple[tuple[str, int, Request], ...], Locality | None, Spread, bool, bool, tuple[Capability, ...]]
