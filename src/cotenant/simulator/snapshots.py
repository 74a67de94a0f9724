"""Snapshots: a cluster with its jobs at one moment, from which a simulation continues.

A snapshot holds what decides where and how long jobs run, and nothing else of a job: no command, no environment, no
labels. It is one JSON object; `docs/snapshots.md` documents it for users. As a trace it is its jobs, as a cluster its
nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cotenant.core.capacity.ledger import Holding, Ledger, Overcommitted
from cotenant.core.model.job import NO_SPREAD, TENANT_DEFAULT, JobKind, Locality, Request, Role, Spread
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import Amounts, amounts_of, as_map
from cotenant.core.model.tenancy import Tenant
from cotenant.core.policy.protocols import EndedJob
from cotenant.simulator import decode
from cotenant.simulator.clusters.cluster import PER_NODE_MAX
from cotenant.simulator.traces.trace_job import BadTrace, TraceJob

VERSION = 1
LISTS = ("nodes", "ended", "jobs")  # written with one line for each entry
KEY = "cotenant_snapshot"
WRONG_SHOWN_MAX = 20
RUN_SECONDS_MAX = 1e10
RUN_SECONDS_UNKNOWN = 3600.0  # of a job if no run time of any job is known


class BadSnapshot(BadTrace):
    """An invalid snapshot, with all its errors."""


@dataclass(frozen=True, slots=True)
class Node(Amounts):
    """A node; `open` if it accepts new jobs."""

    id: str
    gpus: int = 0
    cores: int = 0
    gpu_type: str = ""
    shareable: bool = False
    rack: str = ""
    numa_nodes: int = 1
    open: bool = True

    @property
    def shape(self) -> NodeShape:
        """Its total resources."""
        return NodeShape(self.gpus, self.cores, self.gpu_type, self.shareable, **amounts_of(self))


@dataclass(frozen=True, slots=True)
class Held(Amounts):
    """What a running job holds on one node; `shares` are (GPU number, thousandths) if its GPUs may be shared."""

    node: str
    gpus: int = 0
    cores: int = 0
    shares: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """The prediction of a job: its total run time, the confidence, and the range that holds in 8 of 10 cases."""

    total_seconds: float
    confidence: float
    total_p10_seconds: float | None = None
    total_p90_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Part(Amounts):
    """A role: a number of replicas with the same request. `cores` None is `auto`."""

    name: str = "worker"
    replicas: int = 1
    gpu_milli: int = 0
    cores: int | None = None
    gpu_type: str = ""

    @property
    def role(self) -> Role:
        """The role as a core model."""
        request = Request(self.gpu_milli, self.cores, self.gpu_type, **amounts_of(self))
        return Role(self.name, self.replicas, request)


@dataclass(frozen=True, slots=True)
class Job:
    """A waiting or running job; times are unix seconds. `cores` are those held per replica by role, while it runs.

    `attained_seconds` is the run time of earlier attempts; `borrows`: its present or last run is on resources that were
    lent to it; `refusal` why it waited when the snapshot was taken.
    """

    id: str
    submitted_seconds: float
    roles: tuple[Part, ...]
    kind: JobKind = JobKind.TRAINING
    tenant: str = TENANT_DEFAULT
    user: str = ""
    name: str = ""
    model: str = ""
    priority: int = 0
    preemptible: bool = True
    deadline_seconds: float | None = None
    locality: Locality | None = None
    spread: Spread = NO_SPREAD
    expected_seconds: float | None = None
    attained_seconds: float = 0.0
    running_since_seconds: float | None = None
    held: tuple[Held, ...] = ()
    cores: tuple[int, ...] = ()
    known: Known | None = None
    borrows: bool = False
    refusal: str = ""

    def ran_seconds(self, now: float) -> float:
        """Return its total run time so far."""
        ran = 0.0 if self.running_since_seconds is None else max(0.0, now - self.running_since_seconds)
        return self.attained_seconds + ran


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that ended before the snapshot, for queue policies that learn: what it asked for, and how long it ran.

    `known` is its total run time as predicted when it last started.
    """

    run_seconds: float
    gpu_milli: int = 0
    cores: int = 0
    replicas: int = 1
    known: Known | None = None

    @property
    def possible(self) -> bool:
        """Whether its figures can be true."""
        return 0 < self.run_seconds <= RUN_SECONDS_MAX and min(self.gpu_milli, self.cores, self.replicas - 1) >= 0

    @property
    def history(self) -> EndedJob:
        """The job as queue policies see it."""
        return EndedJob(
            self.gpu_milli,
            self.cores,
            self.replicas,
            self.run_seconds,
            self.run_seconds * self.gpu_milli / 1000,
            self.known.total_seconds if self.known else None,
            self.known.confidence if self.known else 0.0,
        )


@dataclass(frozen=True, slots=True)
class InUse:
    """A policy in use, with its options as strings."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster with its jobs, by arrival, at `taken_seconds` (unix time); and the last jobs that ended, in order."""

    taken_seconds: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    policies: Mapping[str, InUse] = field(default_factory=dict)  # by group: queue, placement, allocator, predictor
    ended: tuple[Ended, ...] = ()
    rules: Mapping[str, str] = field(default_factory=dict)  # of the queue: options of the group `simulator`
    cotenant_snapshot: int = VERSION

    def dump(self) -> str:
        """Return it as JSON, one job per line."""
        whole = asdict(self, dict_factory=as_map)
        head = {KEY: whole.pop(KEY), **{name: value for name, value in whole.items() if name not in LISTS}}
        texts = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
        for name in LISTS:
            lines = ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in whole[name])
            texts.append(f'"{name}": [\n  {lines}\n]' if lines else f'"{name}": []')
        return "{\n" + ",\n".join(texts) + "\n}\n"

    def holdings(self) -> dict[str, tuple[Holding, ...]]:
        """Return what each running job holds, with nodes by number."""
        numbers = {node.id: number for number, node in enumerate(self.nodes)}
        return {
            job.id: tuple(
                Holding(numbers[held.node], held.gpus, held.cores, held.shares, **amounts_of(held)) for held in job.held
            )
            for job in self.jobs
            if job.running_since_seconds is not None
        }

    def total_seconds(self) -> tuple[dict[str, float], int]:
        """Return each job's total run time, and how many of them are guesses.

        The prediction comes first, then the user's expectation. A job without either is assumed to run as long again as
        it has run; a job that has not run yet, for the median of the known run times [R].
        """
        told: dict[str, float] = {}
        for job in self.jobs:
            total = job.known.total_seconds if job.known else job.expected_seconds
            if total is not None:
                told[job.id] = max(total, job.ran_seconds(self.taken_seconds) + 1.0)
        middle = sorted(told.values())[len(told) // 2] if told else RUN_SECONDS_UNKNOWN
        guessed = {job.id: 2 * job.ran_seconds(self.taken_seconds) or middle for job in self.jobs if job.id not in told}
        return told | guessed, len(guessed)


@dataclass(frozen=True, slots=True)
class Run:
    """A run in progress: its start on the trace's clock, its holdings, and the run time of earlier runs."""

    since_seconds: float
    holdings: tuple[Holding, ...]
    attained_seconds: float


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """The state from which a simulation continues, at `now_seconds` on the trace's clock.

    `runs` and `known` are by job; `attained` is the run time of waiting jobs that have run before. Jobs in `borrowing`
    borrow what they hold, or did in their last run. Nodes in `closed` accept no new jobs. Queue policies that learn
    have learned from the jobs in `ended`.
    """

    now_seconds: float
    runs: Mapping[str, Run]
    attained: Mapping[str, float]
    known: Mapping[str, Known]
    closed: tuple[int, ...] = ()
    borrowing: frozenset[str] = frozenset()
    ended: tuple[EndedJob, ...] = ()


def state_of(snapshot: Snapshot) -> tuple[SnapshotState, list[TraceJob], list[str]]:
    """Return the state, the jobs in order of submission from 0 s on, and notes for the user."""
    jobs = sorted(snapshot.jobs, key=lambda job: job.submitted_seconds)
    first = min([job.submitted_seconds for job in jobs[:1]], default=snapshot.taken_seconds)
    totals, guessed = snapshot.total_seconds()
    notes = []
    if guessed:
        notes.append(
            f"the run time of {guessed} of {len(jobs)} jobs is unknown: those that ran are assumed to run as long "
            "again, the others for the median of the known run times"
        )
    holdings = snapshot.holdings()
    runs = {
        job.id: Run(job.running_since_seconds - first, holdings[job.id], job.attained_seconds)
        for job in jobs
        if job.running_since_seconds is not None
    }
    snapshot_state = SnapshotState(
        max(0.0, snapshot.taken_seconds - first),
        runs,
        {job.id: job.attained_seconds for job in jobs if job.id not in runs and job.attained_seconds},
        {job.id: job.known for job in jobs if job.known},
        tuple(number for number, node in enumerate(snapshot.nodes) if not node.open),
        frozenset(job.id for job in jobs if job.borrows),
        tuple(one.history for one in snapshot.ended),
    )
    return snapshot_state, [_trace_job(job, totals[job.id], first) for job in jobs], notes


def _trace_job(job: Job, work_seconds: float, first: float) -> TraceJob:
    """Return a snapshot's job; a running job requests the cores that it holds, so that it would be given them again."""
    roles = [part.role for part in job.roles]
    if job.held and len(job.cores) == len(roles):
        pairs = zip(roles, job.cores, strict=True)
        roles = [replace(role, request=replace(role.request, cores=cores)) for role, cores in pairs]
    return TraceJob(
        id=job.id,
        submitted_seconds=job.submitted_seconds - first,
        work_seconds=work_seconds,
        roles=tuple(roles),
        kind=job.kind,
        tenant=job.tenant,
        model=job.model,
        name=job.name,
        user=job.user,
        priority=job.priority,
        preemptible=job.preemptible,
        deadline_seconds=None if job.deadline_seconds is None else job.deadline_seconds - first,
        locality=job.locality,
        spread=job.spread,
    )


def is_snapshot(path: Path) -> bool:
    """Return whether a file begins like a snapshot."""
    try:
        with path.open("rb") as file:
            begin = file.read(200)
    except OSError:
        return False
    return begin.lstrip().startswith(b"{") and KEY.encode() in begin


def read(path: Path | str) -> Snapshot:
    """Return the snapshot in a file.

    Raises:
        BadSnapshot: the file cannot be read, or its content is invalid.
    """
    try:
        document = Path(path).read_bytes()
    except OSError as error:
        raise BadSnapshot(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    return parse(document, str(path))


def parse(document: bytes, path: str) -> Snapshot:
    """Return the snapshot in a document; errors name it by its path.

    Raises:
        BadSnapshot: its content is invalid.
    """
    try:
        plain_value = json.loads(document.decode())
    except json.JSONDecodeError as error:
        raise BadSnapshot(f"{path}:{error.lineno}:{error.colno}: invalid JSON: {error.msg.lower()}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number too long, or nested too deeply
        raise BadSnapshot(f"{path} is not a snapshot: {error}") from error
    version = plain_value.get(KEY) if isinstance(plain_value, dict) else None
    if version != VERSION:
        what = f"is a snapshot of version {version}" if version else "is not a snapshot"
        raise BadSnapshot(f"{path} {what}; expected version {VERSION}, as written by `cotenant snapshot`")
    wrong: list[str] = []
    snapshot = decode.read(Snapshot, plain_value, "", wrong)
    if snapshot:
        wrong += _contradictions(snapshot)
    if wrong:
        more = [f"… and {len(wrong) - WRONG_SHOWN_MAX} more"] if len(wrong) > WRONG_SHOWN_MAX else []
        raise BadSnapshot(f"{path} is invalid: {'; '.join([*wrong[:WRONG_SHOWN_MAX], *more])}")
    taken: Snapshot = snapshot
    return taken


def _contradictions(snapshot: Snapshot) -> list[str]:
    """Return inconsistencies between valid fields: duplicates, unknown nodes, and more held than exists."""
    wrong: list[str] = []
    for what, ids in (("nodes", [node.id for node in snapshot.nodes]), ("jobs", [job.id for job in snapshot.jobs])):
        wrong += [f"{what}: {one!r} occurs twice" for one in sorted({one for one in ids if ids.count(one) > 1})]
    known = {node.id for node in snapshot.nodes}
    if not known:
        wrong.append("nodes: there are none")
    for node in snapshot.nodes:
        counts = {"gpus": node.gpus, "cores": node.cores}
        wrong += [
            f"nodes {node.id}.{name}: {count} is not from 0 to {PER_NODE_MAX}"
            for name, count in counts.items()
            if not 0 <= count <= PER_NODE_MAX
        ]
    wrong += [
        f"ended {number}: run_seconds must be above 0, requests 0 or more, replicas 1 or more"
        for number, one in enumerate(snapshot.ended)
        if not one.possible
    ]
    for job in snapshot.jobs:
        strangers = sorted({held.node for held in job.held} - known)
        wrong += [
            f"jobs {job.id}: holds resources on {node!r}, which is not a node of the snapshot" for node in strangers
        ]
        if (job.running_since_seconds is None) != (not job.held):
            wrong.append(f"jobs {job.id}: held and running_since_seconds go together")
        if not job.roles or any(part.replicas < 1 or part.gpu_milli < 0 for part in job.roles):
            wrong.append(f"jobs {job.id}: needs at least one role, each with at least one replica")
    if wrong:
        return wrong
    ledger = Ledger([node.shape for node in snapshot.nodes])
    for job_id, holdings in snapshot.holdings().items():
        try:
            for holding in holdings:
                ledger.hold(holding)
        except (Overcommitted, IndexError, KeyError) as error:  # a share of a GPU that is not shared is a KeyError
            told = (
                str(error)
                if isinstance(error, Overcommitted)
                else "a GPU, or a share of one, that its node does not have"
            )
            wrong.append(f"jobs {job_id}: holds what does not exist: {told}")
    return wrong
