"""Snapshots: a cluster with its jobs as they stood at one moment, to be simulated from there on.

A snapshot holds what decides who runs where and for how long, and nothing else of a job: no command, no environment, no
labels. It is one JSON object; `docs/snapshots.md` tells users of it. As a trace it is its jobs, as a cluster its nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cotenant.core.capacity.ledger import Holding, Ledger, Overcommitted
from cotenant.core.model.job import TENANT_DEFAULT, JobKind, Locality, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenant
from cotenant.simulator import decode
from cotenant.simulator.clusters.cluster import PER_NODE_MAX
from cotenant.simulator.traces.trace_job import BadTrace, TraceJob

VERSION = 1
KEY = "cotenant_snapshot"
WRONG_SHOWN_MAX = 20
RUN_SECONDS_UNKNOWN = 3600.0  # of a job of which nothing is known, nor of any other


class BadSnapshot(BadTrace):
    """A snapshot that cannot be taken, with all that is wrong with it."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node; `open` where it takes new work."""

    id: str
    gpus: int = 0
    cores: int = 0
    memory_bytes: int = 0
    gpu_type: str = ""
    shareable: bool = False
    rack: str = ""
    numa_nodes: int = 1
    open: bool = True

    @property
    def shape(self) -> NodeShape:
        """What it has in all."""
        return NodeShape(self.gpus, self.cores, self.memory_bytes, self.gpu_type, self.shareable)


@dataclass(frozen=True, slots=True)
class Held:
    """What a running job holds on one node; `shares` are (GPU's number, thousandths) where its GPUs may be shared."""

    node: str
    gpus: int = 0
    cores: int = 0
    memory_bytes: int = 0
    shares: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """What the predictor said of a job: its run time in all, and how sure it is."""

    total_seconds: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Part:
    """A role: so many replicas that ask for the same. `cores` None is `auto`."""

    name: str = "worker"
    replicas: int = 1
    gpu_milli: int = 0
    cores: int | None = None
    memory_bytes: int = 0
    gpu_type: str = ""

    @property
    def role(self) -> Role:
        """The role in the core's words."""
        return Role(self.name, self.replicas, Request(self.gpu_milli, self.cores, self.memory_bytes, self.gpu_type))


@dataclass(frozen=True, slots=True)
class Job:
    """A job that waits or runs; times are unix seconds. `cores` are those held per replica by role, while it runs.

    `attained_seconds` is the run time of earlier attempts; `refusal` why it waited when the snapshot was taken.
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
    expected_seconds: float | None = None
    attained_seconds: float = 0.0
    running_since_seconds: float | None = None
    held: tuple[Held, ...] = ()
    cores: tuple[int, ...] = ()
    known: Known | None = None
    refusal: str = ""

    def ran_seconds(self, now: float) -> float:
        """Tell how long it has run in all."""
        ran = 0.0 if self.running_since_seconds is None else max(0.0, now - self.running_since_seconds)
        return self.attained_seconds + ran


@dataclass(frozen=True, slots=True)
class InUse:
    """A policy in use, with its options as texts."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster with its jobs, by arrival, at `taken_seconds` (unix time)."""

    taken_seconds: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    policies: Mapping[str, InUse] = field(default_factory=dict)  # by group: queue, placement, allocator, predictor
    rules: Mapping[str, str] = field(default_factory=dict)  # of the queue: options of the group `simulator`
    cotenant_snapshot: int = VERSION

    def dump(self) -> str:
        """Write it as JSON, a job a line."""
        whole = asdict(self)
        head = {KEY: whole.pop(KEY), **{name: value for name, value in whole.items() if name not in ("jobs", "nodes")}}
        texts = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
        for name in ("nodes", "jobs"):
            lines = ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in whole[name])
            texts.append(f'"{name}": [\n  {lines}\n]' if lines else f'"{name}": []')
        return "{\n" + ",\n".join(texts) + "\n}\n"

    def holdings(self) -> dict[str, tuple[Holding, ...]]:
        """Give what each running job holds, nodes by their number."""
        numbers = {node.id: number for number, node in enumerate(self.nodes)}
        return {
            job.id: tuple(
                Holding(numbers[held.node], held.gpus, held.cores, held.memory_bytes, held.shares) for held in job.held
            )
            for job in self.jobs
            if job.running_since_seconds is not None
        }

    def total_seconds(self) -> tuple[dict[str, float], int]:
        """Say how long each job will run in all, and for how many that is a guess.

        What the predictor said comes first, then what the user expects. A job of which nothing is known runs for as
        much again as it has run; one that has not run yet for the median of those that are known [R].
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
    """A run that was under way: since when, on the trace's clock, on what, and the run time of those before it."""

    since_seconds: float
    holdings: tuple[Holding, ...]
    attained_seconds: float


@dataclass(frozen=True, slots=True)
class Present:
    """How things stood when a simulation sets in, at `now_seconds` on the trace's clock.

    `runs` and `known` are by job; `attained` is the run time of those that had run but wait. Nodes in `closed` take no
    new work.
    """

    now_seconds: float
    runs: Mapping[str, Run]
    attained: Mapping[str, float]
    known: Mapping[str, Known]
    closed: tuple[int, ...] = ()


def present_of(snapshot: Snapshot) -> tuple[Present, list[TraceJob], list[str]]:
    """Give the state of things, the jobs in the order of their submission from 0 s on, and what has to be said."""
    jobs = sorted(snapshot.jobs, key=lambda job: job.submitted_seconds)
    first = min([job.submitted_seconds for job in jobs[:1]], default=snapshot.taken_seconds)
    totals, guessed = snapshot.total_seconds()
    notes = []
    if guessed:
        notes.append(
            f"of {guessed} of {len(jobs)} jobs nobody knows the run time: those that ran are taken to run for as much "
            "again, the others for the median of those that are known"
        )
    holdings = snapshot.holdings()
    runs = {
        job.id: Run(job.running_since_seconds - first, holdings[job.id], job.attained_seconds)
        for job in jobs
        if job.running_since_seconds is not None
    }
    present = Present(
        max(0.0, snapshot.taken_seconds - first),
        runs,
        {job.id: job.attained_seconds for job in jobs if job.id not in runs and job.attained_seconds},
        {job.id: job.known for job in jobs if job.known},
        tuple(number for number, node in enumerate(snapshot.nodes) if not node.open),
    )
    return present, [_trace_job(job, totals[job.id], first) for job in jobs], notes


def _trace_job(job: Job, work_seconds: float, first: float) -> TraceJob:
    """One that runs asks for the cores that it holds, so that it would be given them again."""
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
    )


def is_snapshot(path: Path) -> bool:
    """Tell whether a file begins like a snapshot."""
    try:
        with path.open("rb") as file:
            begin = file.read(200)
    except OSError:
        return False
    return begin.lstrip().startswith(b"{") and KEY.encode() in begin


def read(path: Path | str) -> Snapshot:
    """Read a snapshot.

    Raises:
        BadSnapshot: the file cannot be read, or what stands in it cannot be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        plain_value = json.loads(text)
    except OSError as error:
        raise BadSnapshot(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    except json.JSONDecodeError as error:
        raise BadSnapshot(f"{path}:{error.lineno}:{error.colno}: is no JSON: {error.msg.lower()}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number without end, or nested too deeply
        raise BadSnapshot(f"{path} is no snapshot: {error}") from error
    version = plain_value.get(KEY) if isinstance(plain_value, dict) else None
    if version != VERSION:
        what = f"is a snapshot of version {version}" if version else "is no snapshot"
        raise BadSnapshot(f"{path} {what}; one of version {VERSION} was expected, as `cotenant snapshot` writes it")
    wrong: list[str] = []
    snapshot = decode.read(Snapshot, plain_value, "", wrong)
    if snapshot:
        wrong += _contradictions(snapshot)
    if wrong:
        more = [f"… and {len(wrong) - WRONG_SHOWN_MAX} more"] if len(wrong) > WRONG_SHOWN_MAX else []
        raise BadSnapshot("\n  ".join([f"{path} cannot be taken:", *wrong[:WRONG_SHOWN_MAX], *more]))
    taken: Snapshot = snapshot
    return taken


def _contradictions(snapshot: Snapshot) -> list[str]:
    """Name what cannot be though each field is well: twins, strangers, and more held than there is."""
    wrong: list[str] = []
    for what, ids in (("nodes", [node.id for node in snapshot.nodes]), ("jobs", [job.id for job in snapshot.jobs])):
        wrong += [f"{what}: {one!r} is there twice" for one in sorted({one for one in ids if ids.count(one) > 1})]
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
    for job in snapshot.jobs:
        strangers = sorted({held.node for held in job.held} - known)
        wrong += [f"jobs {job.id}: holds something on {node!r}, which is no node" for node in strangers]
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
            told = str(error) if isinstance(error, Overcommitted) else "a GPU, or a share of one, that its node has not"
            wrong.append(f"jobs {job_id}: holds what is not there: {told}")
    return wrong
