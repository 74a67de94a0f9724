"""Lookup of jobs and nodes by an exact id, or by a unique prefix or suffix of an id."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.codec.errors import from_error
from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import Phase
from cotenant.core.spelling import nearest
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import (
    JOB_VIEW_BASIC,
    GetJobRequest,
    GetJobResponse,
    JobFilter,
    JobView,
    ListJobsRequest,
)
from cotenant.v1.node_service_pb2 import GetNodeRequest, GetNodeResponse, ListNodesRequest, Node

T = TypeVar("T", Job, Node)
PAGE_SIZE = 1000
CANDIDATES_SHOWN_MAX = 10


async def all_jobs(
    mesh: Mesh,
    wanted: JobFilter | None = None,
    *,
    fold_arrays: bool = False,
    view: JobView.ValueType = JOB_VIEW_BASIC,
) -> AsyncIterator[Job]:
    """Yield all matching jobs, newest first, page by page; with `fold_arrays` one job per array."""
    token = ""
    while True:
        request = ListJobsRequest(
            filter=wanted, page_size=PAGE_SIZE, page_token=token, fold_arrays=fold_arrays, view=view
        )
        page = await mesh.jobs.ListJobs(request)
        for job in page.jobs:
            yield job
        token = page.next_page_token
        if not token:
            return


async def all_nodes(mesh: Mesh) -> AsyncIterator[Node]:
    """Yield all nodes by id, page by page."""
    token = ""
    while True:
        page = await mesh.nodes.ListNodes(ListNodesRequest(page_size=PAGE_SIZE, page_token=token))
        for node in page.nodes:
            yield node
        token = page.next_page_token
        if not token:
            return


async def find_job(mesh: Mesh, text: str) -> Job:
    """Return the job with this id, prefix or suffix; jobs are listed only if the text is not a full id.

    Raises:
        CommandError: no job matches, or more than one.
    """
    found = await find_job_or_array(mesh, text)
    if found.id == found.spec.array_task.array_id:
        first, count = f"{found.id}_{found.spec.array_task.index}", found.spec.array_task.count
        raise usage_error(f"{found.id} is an array of {count} jobs", hint=f"name one of its jobs, such as {first}")
    return found


async def find_job_or_array(mesh: Mesh, text: str) -> Job:
    """Return the matching job or array; an array is represented by one of its jobs with the array's id.

    Raises:
        CommandError: nothing matches, or more than one.
    """
    try:
        exact: GetJobResponse = await mesh.jobs.GetJob(GetJobRequest(id=text))
        return exact.job
    except grpc.aio.AioRpcError as error:
        problem = from_error(error)
        is_array = problem.reason == "IS_ARRAY"
        if not is_array and error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            raise
    known = [job async for job in all_jobs(mesh, JobFilter(array_id=text) if is_array else None, fold_arrays=True)]
    for job in known:
        job.id = job.spec.array_task.array_id or job.id
    if is_array and (first := problem.metadata.get("first")):  # archived: lists do not include it
        exact = await mesh.jobs.GetJob(GetJobRequest(id=first))
        exact.job.id = exact.job.spec.array_task.array_id
        return exact.job
    if is_array and not known:  # deleted in between
        raise usage_error(problem.message)
    if is_array:
        return known[0]
    head, separator, index = text.rpartition("_")
    if separator and index.isdecimal():
        array = match_id(head, [job for job in known if job.spec.HasField("array_task")], "array", _job_line)
        exact = await mesh.jobs.GetJob(GetJobRequest(id=f"{array.id}_{int(index)}"))
        return exact.job
    found = match_id(text, known, "job", _job_line)
    if found.id == found.spec.array_task.array_id:
        return found
    exact = await mesh.jobs.GetJob(GetJobRequest(id=found.id))  # the list has the BASIC view
    return exact.job


async def find_jobs_and_arrays(mesh: Mesh, texts: Sequence[str]) -> list[Job]:
    """Return all matching jobs and arrays without duplicates, before any of them is changed."""
    found = [await find_job_or_array(mesh, text) for text in texts]
    return list({job.id: job for job in found}.values())


async def find_node(mesh: Mesh, text: str) -> Node:
    """Return the node with this id, prefix or suffix.

    Raises:
        CommandError: no node matches, or more than one.
    """
    try:
        exact: GetNodeResponse = await mesh.nodes.GetNode(GetNodeRequest(id=text))
        return exact.node
    except grpc.aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            raise
    return match_id(text, [node async for node in all_nodes(mesh)], "node", lambda node: node.id)


def match_id(text: str, known: Iterable[T], kind: str, show: Callable[[T], str]) -> T:
    """Return the item whose id starts or ends with the text.

    Raises:
        CommandError: no id matches, or more than one.
    """
    everything = list(known)
    matching = [one for one in everything if text and (one.id.startswith(text) or one.id.endswith(text))]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise _ambiguous(text, kind, [show(one) for one in matching])
    near = nearest(text, (one.id for one in everything))
    lists = "nodes" if kind == "node" else "jobs"
    hint = f"did you mean {' or '.join(near)}?" if near else f"list them with `cotenant {lists}`"
    raise usage_error(f"{kind} {text!r} not found", hint=hint)


def _ambiguous(text: str, kind: str, lines: Sequence[str]) -> CommandError:
    shown = list(lines[:CANDIDATES_SHOWN_MAX])
    if len(lines) > CANDIDATES_SHOWN_MAX:
        shown.append(f"and {len(lines) - CANDIDATES_SHOWN_MAX} more")
    return usage_error(f"{text!r} matches {len(lines)} {kind}s", details=shown, hint="type more of the id")


def _job_line(job: Job) -> str:
    return f"{job.id}  {phase_of(job)}  {job.spec.name}".rstrip()


def phase_of(job: Job) -> Phase | str:
    """Return the phase of a job; a phase that only a newer server knows keeps its number."""
    try:
        return PHASES.from_wire(job.phase)
    except KeyError:
        return f"phase {job.phase}"
