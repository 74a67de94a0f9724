"""The cluster and jobs of Slurm as the core sees them: specs, gangs, a ledger, and nodes that a job may use. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import NO_SPREAD, TENANT_DEFAULT, JobKind, JobSpec, Request, Role, Spread, SpreadBy
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal, plural
from cotenant.core.placement.constraint import Constraint, Lacking
from cotenant.core.scheduling.cycle import gang_with
from cotenant.services.slurm.records import Picture, SlurmJob, SlurmNode

Marks = NDArray[np.bool_]

WHOLE_GPU = 1000
PRIORITY_MAX = 1000  # of a job of ours
NAMED_MAX = 5
_FEATURE = re.compile(r"[\w.:=-]+")


@dataclass(frozen=True)
class SlurmNodes(Constraint):
    """Keeps a gang on the nodes of its partitions that have its features and that it does not exclude."""

    names: frozenset[str]
    why: str = ""

    def _usable(self, ledger: Ledger) -> Marks:
        usable = np.zeros(len(ledger), dtype=np.bool_)
        usable[[ledger.numbers[name] for name in self.names if name in ledger.numbers]] = True
        return usable

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return the nodes that the gang may use."""
        return self._usable(ledger)

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return that no node that it may use has room."""
        there = int((able & self._usable(ledger)).sum())
        if there:
            return None
        could = "could hold a replica even if empty" if empty else "has room"
        detail = f"none of the {plural(len(self.names), 'node')} that it may use {could}"
        return Lacking(f"{detail}{self.why}", "it accepts other nodes", {"nodes_usable": len(self.names)})

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a refusal that says that only some nodes count."""
        if not self.why or refusal.detail.endswith(self.why):
            return refusal
        return replace(refusal, detail=f"{refusal.detail}{self.why}")


def shape_of(node: SlurmNode, *, memory_counts: bool) -> NodeShape:
    """Return the shape of a node; without memory if Slurm does not allocate it."""
    return NodeShape(node.gpus, node.cores, node.gpu_type, memory_bytes=node.memory_bytes if memory_counts else 0)


def cores_of(cpus: int, picture: Picture) -> int:
    """Return the cores of a number of CPUs, which are hardware threads."""
    threads = max((node.threads for node in picture.nodes.values()), default=1)
    return -(-cpus // threads)


def usable_nodes(job: SlurmJob, picture: Picture) -> frozenset[str]:
    """Return the nodes that a job's partitions, features and lists of nodes allow, whatever their state."""
    return frozenset(node.name for node in picture.nodes.values() if not misfit(job, node))


def misfit(job: SlurmJob, node: SlurmNode) -> str:
    """Return why a job can never run on a node, or "".

    >>> misfit(SlurmJob("1", 1, features="fast&(a|b)"), SlurmNode("n1", features=frozenset({"fast"})))
    "lacks the feature 'fast&(a|b)'"
    """
    if job.partitions and node.partitions and not node.partitions & {*job.partitions}:
        return f"is not in partition {','.join(job.partitions)}"
    if node.name in job.excluded_nodes:
        return "is excluded by the job"
    if len(job.required_nodes) >= job.nodes_min and job.required_nodes and node.name not in job.required_nodes:
        return "is not among the nodes that the job requires"
    if job.features and not has_features(job.features, node.features):
        return f"lacks the feature {job.features!r}"
    if job.gpu_type and node.gpus and node.gpu_type and node.gpu_type != job.gpu_type:
        return f"has {node.gpu_type} GPUs"
    per_node = job.gpus_per_node or min(1, job.gpus_total)
    return f"has {plural(node.gpus, 'GPU')}, {per_node} are needed" if node.gpus < per_node else ""


def has_features(wanted: str, features: Collection[str]) -> bool:
    """Return whether a node's features meet a constraint; of what is not understood, every node is thought to.

    >>> has_features("a&b|c", {"c"}), has_features("a&(b|c)", {"a"}), has_features("[rack1*2&rack2]", {})
    (True, False, True)
    """
    if "*" in wanted or "[" in wanted:
        return True
    tokens = re.findall(r"[\w.:=-]+|[&|,()]", wanted)[:200]
    place = 0

    def alternatives() -> bool:
        nonlocal place
        met = sequence()
        while place < len(tokens) and tokens[place] == "|":
            place += 1
            met = sequence() or met
        return met

    def sequence() -> bool:
        nonlocal place
        met = term()
        while place < len(tokens) and tokens[place] in "&,":
            place += 1
            met = term() and met
        return met

    def term() -> bool:
        nonlocal place
        if place >= len(tokens):
            return True
        name, place = tokens[place], place + 1
        if name == "(":
            met = alternatives()
            place += 1
            return met
        return not _FEATURE.fullmatch(name) or name in features

    return alternatives()


# Specs and gangs -----------------------------------------------------------------------------------------------


def spec_of(job: SlurmJob, picture: Picture, priority: int = 0) -> JobSpec:
    """Return a job as a spec of ours: one replica per node, or per task if its tasks may be anywhere."""
    memory = job.memory_bytes if picture.memory_counts else 0
    nodes = max(1, job.nodes_min)
    by_task = job.processes > nodes and not job.gpus_total and not job.exclusive and not job.placed
    replicas = job.processes if by_task else len(job.placed) or nodes
    cores = max(1, -(-cores_of(job.cpus, picture) // replicas)) if job.cpus else 1
    gpus = -(-job.gpus_total // replicas)
    if job.exclusive and not job.placed:
        cores, gpus = _whole_nodes(job, picture, replicas, cores, gpus)
    request = Request(gpus * WHOLE_GPU, cores, job.gpu_type, memory_bytes=memory // replicas)
    labels = {
        "slurm.partition": ",".join(job.partitions),
        "slurm.account": job.account,
        "slurm.qos": job.qos,
        "slurm.array": str(job.array) if job.task is not None else "",
        "slurm.state": job.state,
    }
    return JobSpec(
        name=job.name,
        kind=JobKind.TRAINING if job.gpus_total else JobKind.CPU,
        tenant=job.account or TENANT_DEFAULT,
        roles=(Role("task", replicas, request),),
        command=(job.command,) if job.command else (),
        working_directory=job.directory,
        priority=priority,
        preemptible=False,
        profiled=False,
        labels=tuple(sorted((name, value) for name, value in labels.items() if value)),
        time_limit_seconds=job.time_limit_seconds or None,
        expected_seconds=job.time_limit_seconds or None,  # what its user says of its length
        spread=Spread(SpreadBy.NODE, nodes) if nodes > 1 else NO_SPREAD,
    )


def _whole_nodes(job: SlurmJob, picture: Picture, replicas: int, cores: int, gpus: int) -> tuple[int, int]:
    """Return the cores and GPUs of whole nodes: what the job needs, of the smallest of the largest nodes it may use."""
    usable = sorted((node.cores, node.gpus) for name in usable_nodes(job, picture) if (node := picture.nodes[name]))
    largest = usable[-replicas:]
    return (max(cores, largest[0][0]), max(gpus, min(one for _, one in largest))) if largest else (cores, gpus)


def gang_of(job: SlurmJob, spec: JobSpec, picture: Picture, now: float, estimate: Estimate = UNKNOWN) -> Gang:
    """Return a waiting job's gang, kept on the nodes that it may use."""
    gang = gang_with(
        job.id,
        spec,
        estimate,
        [role.request.cores or 0 for role in spec.roles],
        "",
        waited_seconds=max(0.0, now - (job.eligible_seconds or job.submitted_seconds or now)),
    )
    usable = usable_nodes(job, picture)
    if len(usable) == len(picture.nodes):
        return gang
    why = f" (counting only {_named(sorted(usable))})" if usable else " (no node meets its constraints)"
    return replace(gang, constraints=(*gang.constraints, SlurmNodes(usable, why)))


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMED_MAX} more" if len(listed) > NAMED_MAX else ""
    return ", ".join(listed[:NAMED_MAX]) + more


# The ledger ----------------------------------------------------------------------------------------------------


def holdings_of(job: SlurmJob, picture: Picture, numbers: Mapping[str, int]) -> tuple[Holding, ...]:
    """Return what a job holds, by node number; a suspended job keeps its GPUs and memory."""
    count = max(1, len(job.placed))
    share = -(-cores_of(job.cpus, picture) // count)
    memory = job.memory_bytes // count if picture.memory_counts else 0
    return tuple(
        Holding(
            numbers[placed.node],
            len(placed.gpus) or (-(-job.gpus_total // count)),
            0 if job.paused else len(placed.cores) or share,
            memory_bytes=memory,
        )
        for placed in job.placed
        if placed.node in numbers
    )


def ledger_of(picture: Picture) -> tuple[Ledger, dict[str, tuple[Holding, ...]]]:
    """Return the ledger with all that jobs hold, and their holdings. What Slurm overcommits is held as far as free."""
    names = sorted(picture.nodes)
    nodes = [picture.nodes[name] for name in names]
    ledger = Ledger([shape_of(node, memory_counts=picture.memory_counts) for node in nodes], ids=names)
    ledger.open[:] = [node.open for node in nodes]
    held: dict[str, tuple[Holding, ...]] = {}
    for job in picture.jobs.values():
        if not (job.runs or job.paused):
            continue
        taken = [_clamped(one, ledger) for one in holdings_of(job, picture, ledger.numbers)]
        for holding in taken:
            ledger.hold(holding)
        held[job.id] = tuple(taken)
    return ledger, held


def _clamped(holding: Holding, ledger: Ledger) -> Holding:
    node = holding.node
    return replace(
        holding,
        gpus=min(holding.gpus, int(ledger.free_gpus[node])),
        cores=min(holding.cores, int(ledger.free_cores[node])),
        memory_bytes=min(holding.memory_bytes, int(ledger.free_memory[node])),
    )


def in_slurms_order(picture: Picture) -> list[SlurmJob]:
    """Return the waiting jobs in the order in which Slurm considers them: by priority, then by number."""
    waiting = [job for job in picture.jobs.values() if job.waits]
    return sorted(waiting, key=lambda job: (-job.priority, job.submitted_seconds, job.number, job.task or 0))


def ruled_out(job: SlurmJob, spec: JobSpec, picture: Picture, ledger: Ledger) -> dict[str, str]:
    """Return why each node cannot hold a replica of a job now; nodes that could are left out."""
    request = spec.roles[0].request
    found: dict[str, str] = {}
    for name, node in sorted(picture.nodes.items()):
        number = ledger.numbers[name]
        gpus, cores = -(-request.gpu_milli // WHOLE_GPU), request.cores or 0
        free_gpus, free_cores = int(ledger.free_gpus[number]), int(ledger.free_cores[number])
        if why := misfit(job, node):
            found[name] = why
        elif not node.open:
            found[name] = f"is {'+'.join(sorted(node.states)).lower()}" + (f": {node.reason}" if node.reason else "")
        elif free_gpus < gpus:
            found[name] = f"{free_gpus} of {plural(node.gpus, 'GPU')} free, {gpus} needed"
        elif free_cores < cores:
            found[name] = f"{free_cores} of {plural(node.cores, 'core')} free, {cores} needed"
    return found
