"""`cotenant snapshot`: save the cluster and its jobs to a file, as the start of simulations."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.tenants import all_tenants
from cotenant.cli.name_lookup import all_jobs, all_nodes
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.pages import pages
from cotenant.cli.render import print_card
from cotenant.codec import specs
from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import Code
from cotenant.core.model.resources import amounts_of
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JOB_VIEW_FULL, JobFilter, ListJobsRequest
from cotenant.v1.node_service_pb2 import NODE_STATE_READY, Node
from cotenant.v1.policy_service_pb2 import ListPoliciesRequest
from cotenant.v1.predictor_service_pb2 import Estimate, EstimateQuery, EstimateRequest
from cotenant.v1.resources_pb2 import NodeAllocation
from cotenant.v1.tenant_service_pb2 import ListQueuesRequest

if TYPE_CHECKING:  # the simulator is imported only to take a snapshot
    from cotenant.core.model.tenancy import Tenant
    from cotenant.simulator import snapshots

ESTIMATES_MAX = 1000
ENDED_MAX = 1000  # jobs that ended, for policies that learn from them: the longest page
STDOUT = Path("-")
OMITTED = {
    Code.DEPENDENCY: "wait for other jobs",
    Code.BEGIN_TIME: "wait for their begin time",
    Code.SECRETS: "wait for secrets",
}
PHASES = (Phase.QUEUED, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
GROUPS = {
    "cotenant.placement_policies": "placement",
    "cotenant.cpu_allocators": "allocator",
    "cotenant.predictors": "predictor",
    "cotenant.contention_policies": "contention",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("snapshot")(snapshot)


def snapshot(
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Output file; - is stdout; default: named by the time."),
    ] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Replace names of tenants, users, jobs, models and nodes by numbers.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Save the cluster's state: nodes, waiting and running jobs, and policies.

    Commands, environments and labels of jobs are not included. Simulate it with `cotenant simulate --from-snapshot
    FILE`.

    \b
    Examples:
      cotenant snapshot
      cotenant snapshot --anonymous -o - | gzip > support.json.gz
      cotenant simulate --from-snapshot snapshot-20260102-030405.json --queue srsf
    """
    taken = with_mesh(Flags.of(context), read_snapshot)
    if anonymous:
        from cotenant.cli.research.anonymous import anonymize

        taken = anonymize(taken)
    text = taken.dump()
    if output == STDOUT:
        print(text, end="")
        return
    moment = datetime.fromtimestamp(taken.taken_seconds, UTC)
    path = output or Path(f"snapshot-{moment:%Y%m%d-%H%M%S}.json")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise usage_error(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
    running = sum(job.running_since_seconds is not None for job in taken.jobs)
    counts = {"nodes": len(taken.nodes), "running": running, "waiting": len(taken.jobs) - running}
    if as_json:
        print(json.dumps({"file": str(path), **counts}))
        return
    print_card([("file", str(path)), *((name, f"{count:,}") for name, count in counts.items())])
    note(f"simulate it: cotenant simulate --from-snapshot {path}")


def jobs_filter() -> JobFilter:
    """Return the filter for the jobs of a snapshot: those that wait or hold resources."""
    return JobFilter(phases=[specs.PHASES.to_wire(phase) for phase in PHASES])


async def read_snapshot(mesh: Mesh, tell: Callable[[str], None] = note) -> snapshots.Snapshot:
    """Return a snapshot; `tell` receives what it leaves out. Jobs are read before nodes: it has each node in use."""
    from cotenant.codec.tenants import tenant_of
    from cotenant.simulator import snapshots

    now = time.time()
    found = sorted(
        [job async for job in all_jobs(mesh, jobs_filter(), view=JOB_VIEW_FULL)],
        key=lambda job: job.create_time.ToNanoseconds(),
    )
    jobs = [job for job in found if job.refusal.code not in OMITTED]
    for code, what in OMITTED.items():
        if omitted := sum(job.refusal.code == code for job in found):
            tell(f"omitted jobs that {what}: {omitted:,}")
    if held := sum(job.refusal.code == Code.ARRAY_LIMIT for job in jobs):
        tell(f"jobs at their array's limit, which simulations ignore: {held:,}")
    nodes = [node async for node in all_nodes(mesh)]
    estimates = [estimate async for estimate in _estimates(mesh, jobs)]
    tenants = [tenant_of(tenant) async for tenant in all_tenants(mesh)]
    queues = await mesh.tenants.ListQueues(ListQueuesRequest())
    in_use = {"queue": snapshots.InUse(queues.queues[0].policy, dict(queues.queues[0].options))}
    for stub in mesh.policies().values():
        listed = pages(stub.ListPolicies, ListPoliciesRequest())
        for policy in [policy async for page in listed for policy in page.policies]:
            if policy.active and (group := GROUPS.get(policy.group)):
                in_use.setdefault(group, snapshots.InUse(policy.name, dict(policy.options_given)))
    known = {node.id: node for node in nodes}
    parents = frozenset(tenant.parent for tenant in tenants)
    ended = await mesh.jobs.ListJobs(
        ListJobsRequest(
            filter=JobFilter(phases=[specs.PHASES.to_wire(phase) for phase in Phase if phase.ended]),
            order_by="end_time desc",
            page_size=ENDED_MAX,
        )
    )
    return snapshots.Snapshot(
        now,
        tuple(_node(node) for node in nodes),
        tuple(_job(job, estimate, known) for job, estimate in zip(jobs, estimates, strict=True)),
        tuple(tenant for tenant in tenants if _affects_scheduling(tenant, parents)),
        in_use,
        tuple(_ended(job) for job in sorted(ended.jobs, key=_by_end) if specs.seconds(job.run_time) > 0),
        dict(queues.queues[0].rules),
    )


def _affects_scheduling(tenant: Tenant, parents: frozenset[str]) -> bool:
    """Return whether a tenant can affect a decision."""
    return bool(tenant.has_quota or tenant.has_limit or tenant.weight != 1 or tenant.parent or tenant.id in parents)


async def _estimates(mesh: Mesh, jobs: Sequence[Job]) -> AsyncIterator[Estimate]:
    """Yield the predictor's estimates of all jobs, queried as the queue does."""
    for first in range(0, len(jobs), ESTIMATES_MAX):
        queries = [
            EstimateQuery(
                job_id=job.id,
                spec=job.spec,
                attained_gpu_seconds=job.attained_gpu_seconds,
                run_time=specs.duration(_ran_seconds(job)),
                progress=job.progress,
                submitter=job.submitter,
                submit_time=job.create_time,
            )
            for job in jobs[first : first + ESTIMATES_MAX]
        ]
        response = await mesh.predictor.Estimate(EstimateRequest(queries=queries))
        for estimate in response.estimates:
            yield estimate


def _node(node: Node) -> snapshots.Node:
    from cotenant.simulator import snapshots

    inventory = specs.inventory_from_wire(node.inventory)
    return snapshots.Node(
        node.id,
        len(inventory.gpus),
        len(inventory.cores),
        inventory.gpu_type,
        inventory.shareable,
        inventory.rack,
        max(1, len({core.numa_node for core in inventory.cores})),
        node.state == NODE_STATE_READY,
        **amounts_of(inventory),
    )


def _job(job: Job, estimate: Estimate, nodes: Mapping[str, Node]) -> snapshots.Job:
    from cotenant.simulator import snapshots

    spec, attempt = specs.spec_from_wire(job.spec), job.attempt
    runs = (
        specs.PHASES.from_wire(job.phase).holds_resources and not attempt.pre_run
    )  # in a pre-run, the gang still waits
    since = attempt.start_time if attempt.HasField("start_time") else attempt.assign_time
    known = None
    if estimate.predictable:
        known = _known(_ran_seconds(job), estimate)
    return snapshots.Job(
        id=job.id,
        submitted_seconds=specs.seconds(job.create_time),
        roles=tuple(
            snapshots.Part(
                role.name,
                role.replicas,
                role.request.gpu_milli,
                role.request.cores,
                role.request.gpu_type,
                **amounts_of(role.request),
            )
            for role in spec.roles
        ),
        kind=spec.kind,
        tenant=spec.tenant,
        user=job.submitter,
        name=spec.name,
        model=spec.model,
        priority=spec.priority,
        preemptible=spec.preemptible,
        deadline_seconds=spec.deadline_seconds,
        locality=spec.locality,
        spread=spec.spread,
        expected_seconds=spec.expected_seconds,
        attained_seconds=specs.seconds(job.run_time),
        running_since_seconds=specs.seconds(since) if runs else None,
        held=tuple(_held(attempt.allocations, nodes)) if runs else (),
        cores=tuple(_cores(job, role.name) for role in spec.roles) if runs else (),
        known=known,
        borrows=any(task.reclaimable for part in attempt.allocations for task in part.tasks),
        refusal=f"{job.refusal.code}: {job.refusal.detail}" if job.refusal.code else "",
    )


def _known(ran_seconds: float, estimate: Estimate) -> snapshots.Known:
    """Return what is predicted of a job's total run time."""
    from cotenant.simulator import snapshots

    early, late = (
        ran_seconds + specs.seconds(getattr(estimate, name)) if estimate.HasField(name) else None
        for name in ("remaining_p10", "remaining_p90")
    )
    return snapshots.Known(ran_seconds + specs.seconds(estimate.remaining), estimate.confidence, early, late)


def _by_end(job: Job) -> tuple[int, str]:
    return job.end_time.ToNanoseconds(), job.id


def _ended(job: Job) -> snapshots.Ended:
    from cotenant.simulator import snapshots

    spec, known = specs.spec_from_wire(job.spec), None
    if job.HasField("predicted_run_time"):
        known = snapshots.Known(specs.seconds(job.predicted_run_time), job.prediction_confidence)
    cores = sum(role.replicas * (role.request.cores or 1) for role in spec.roles)
    return snapshots.Ended(specs.seconds(job.run_time), spec.gpu_milli, cores, spec.replicas, known)


def _ran_seconds(job: Job) -> float:
    """Return how long a job has run over all attempts, including a running one."""
    attempt = job.attempt
    runs = attempt.HasField("start_time") and not attempt.HasField("end_time")
    return specs.seconds(job.run_time) + (max(0.0, time.time() - specs.seconds(attempt.start_time)) if runs else 0.0)


def _held(allocations: Sequence[NodeAllocation], nodes: Mapping[str, Node]) -> Iterator[snapshots.Held]:
    from cotenant.simulator import snapshots

    for allocation in allocations:
        held = specs.allocation_from_wire(allocation)
        gpus = nodes[held.node_id].inventory.gpus if held.node_id in nodes else ()
        numbers = {gpu.uuid: number for number, gpu in enumerate(gpus)}
        parts = tuple((numbers[share.uuid], share.milli) for task in held.tasks for share in task.gpus)
        shared = any(gpu.shareable for gpu in gpus)
        yield snapshots.Held(
            held.node_id,
            0 if shared else len(parts),
            held.cores,
            parts if shared else (),
            **amounts_of(held.resources),
        )


def _cores(job: Job, role: str) -> int:
    tasks = [task for part in job.attempt.allocations for task in part.tasks if task.role == role]
    return max((len(task.core_ids) for task in tasks), default=0)
