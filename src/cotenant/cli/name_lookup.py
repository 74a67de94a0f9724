"""Lookup of jobs and nodes: by an exact id, of jobs then by name or as `@last`, then by a unique part of an id.

A name means the newest job of the caller with that name; if the caller has none, the only job of others with it. The
queue finds them, so every machine finds the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from cotenant.cli.arrays import SEPARATOR, indices_of, leading_phase
from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import CommandError, ExitCode, usage_error
from cotenant.codec.errors import from_error
from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import Phase
from cotenant.core.spelling import nearest
from cotenant.deferred import grpc
from cotenant.v1.array_service_pb2 import Array, GetArrayRequest, GetArrayResponse, ListArraysRequest
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import (
    JOB_VIEW_BASIC,
    JOB_VIEW_FULL,
    GetJobRequest,
    GetJobResponse,
    JobFilter,
    JobView,
    ListJobsRequest,
)
from cotenant.v1.node_service_pb2 import GetNodeRequest, GetNodeResponse, ListNodesRequest, Node

IS_ARRAY = "IS_ARRAY"  # the reason of a call for one job with the id of an array
LAST = "@last"  # the caller's newest submission
PAGE_SIZE = 1000
CANDIDATES_SHOWN_MAX = 10


class NoMatch(CommandError):
    """No job, array or node has the given id or name."""


class HasId(Protocol):
    """A job, an array or a node."""

    id: str


T = TypeVar("T", bound=HasId)


async def all_jobs(
    mesh: Mesh, wanted: JobFilter | None = None, *, view: JobView.ValueType = JOB_VIEW_BASIC
) -> AsyncIterator[Job]:
    """Yield all matching jobs, newest first, page by page."""
    token = ""
    while True:
        request = ListJobsRequest(filter=wanted, page_size=PAGE_SIZE, page_token=token, view=view)
        page = await mesh.jobs.ListJobs(request)
        for job in page.jobs:
            yield job
        token = page.next_page_token
        if not token:
            return


async def all_arrays(mesh: Mesh) -> AsyncIterator[Array]:
    """Yield all arrays, newest first, page by page."""
    token = ""
    while True:
        page = await mesh.arrays.ListArrays(ListArraysRequest(page_size=PAGE_SIZE, page_token=token))
        for array in page.arrays:
            yield array
        token = page.next_page_token
        if not token:
            return


async def read_tasks(mesh: Mesh, array_id: str) -> list[Job]:
    """Return all jobs of an array, sorted by index."""
    found = [job async for job in all_jobs(mesh, JobFilter(array_id=array_id), view=JOB_VIEW_FULL)]
    return sorted(found, key=lambda job: job.spec.array_task.index)


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
    if isinstance(found, Array):
        raise not_one_job(found)
    return found


def not_one_job(array: Array) -> CommandError:
    """Return the error for an array where a single job is expected."""
    indices = indices_of(array).indices
    hint = f"name one of its jobs, such as {array.id}{SEPARATOR}{indices[0]}" if indices else ""
    return usage_error(f"{array.id} is an array of {array.job_count} jobs", hint=hint)


async def find_job_or_array(mesh: Mesh, text: str) -> Job | Array:
    """Return the job or array with this id or name, or with an id that begins or ends so.

    Raises:
        CommandError: nothing matches, or more than one.
    """
    try:
        exact: GetJobResponse = await mesh.jobs.GetJob(GetJobRequest(id=text))
        return exact.job
    except grpc.aio.AioRpcError as error:
        is_array = from_error(error).reason == IS_ARRAY
        if not is_array and error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
            raise
    if is_array:
        found: GetArrayResponse = await mesh.arrays.GetArray(GetArrayRequest(id=text))
        return found.array
    if named := await _find_named(mesh, text):
        return named
    head, separator, index = text.rpartition(SEPARATOR)
    is_task = bool(separator) and index.isdecimal()
    named = await _find_named(mesh, head) if is_task else None
    arrays = [named] if isinstance(named, Array) else [array async for array in all_arrays(mesh)]
    if is_task:
        array = named if isinstance(named, Array) else match_id(head, arrays, "array", _line)
        exact = await mesh.jobs.GetJob(GetJobRequest(id=f"{array.id}{SEPARATOR}{int(index)}"))
        return exact.job
    jobs = [job async for job in all_jobs(mesh, JobFilter(standalone_only=True))]
    known: list[Job | Array] = sorted([*jobs, *arrays], key=lambda one: one.id, reverse=True)
    found_id = match_id(text, known, "job", _line).id
    for array in arrays:
        if array.id == found_id:
            return array
    exact = await mesh.jobs.GetJob(GetJobRequest(id=found_id))  # the list has the BASIC view
    return exact.job


async def _find_named(mesh: Mesh, text: str) -> Job | Array | None:
    """Return the job or array that a name or `@last` means; None if there is none.

    Raises:
        CommandError: several jobs of others have the name, or the caller has submitted nothing.
    """
    last = text == LAST
    mine = JobFilter(own_only=True, name="" if last else text)
    found = await mesh.jobs.ListJobs(ListJobsRequest(filter=mine, page_size=1))
    if found.jobs:
        return await _whole(mesh, found.jobs[0])
    if last:
        raise NoMatch(
            f"{LAST}: you have submitted no job that is still listed",
            hint="see `cotenant history`",
            code=ExitCode.USAGE,
        )
    others = {job.spec.array_task.array_id or job.id: job async for job in all_jobs(mesh, JobFilter(name=text))}
    if len(others) > 1:
        raise usage_error(
            f"{text!r} is the name of {len(others)} jobs, none of them yours",
            details=_shortened([f"{one}  {phase_of(job)}  of {job.submitter}" for one, job in others.items()]),
            hint="give an id",
        )
    return await _whole(mesh, next(iter(others.values()))) if others else None


async def _whole(mesh: Mesh, job: Job) -> Job | Array:
    """Return a listed job with all that is known of it, or the array that it belongs to."""
    if job.spec.HasField("array_task"):
        found: GetArrayResponse = await mesh.arrays.GetArray(GetArrayRequest(id=job.spec.array_task.array_id))
        return found.array
    exact: GetJobResponse = await mesh.jobs.GetJob(GetJobRequest(id=job.id))
    return exact.job


async def find_jobs_and_arrays(mesh: Mesh, texts: Sequence[str]) -> list[Job | Array]:
    """Return all matching jobs and arrays without duplicates, before any of them is changed."""
    found = [await find_job_or_array(mesh, text) for text in texts]
    return list({one.id: one for one in found}.values())


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
    raise NoMatch(f"{kind} {text!r} not found", hint=hint, code=ExitCode.USAGE)


def _ambiguous(text: str, kind: str, lines: Sequence[str]) -> CommandError:
    return usage_error(f"{text!r} matches {len(lines)} {kind}s", details=_shortened(lines), hint="type more of the id")


def _shortened(lines: Sequence[str]) -> list[str]:
    more = len(lines) - CANDIDATES_SHOWN_MAX
    return [*lines[:CANDIDATES_SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])]


def _line(found: Job | Array) -> str:
    phase = leading_phase(found) if isinstance(found, Array) else phase_of(found)
    return f"{found.id}  {phase}  {found.spec.name}".rstrip()


def phase_of(job: Job) -> Phase | str:
    """Return the phase of a job; a phase that only a newer server knows keeps its number."""
    try:
        return PHASES.from_wire(job.phase)
    except KeyError:
        return f"phase {job.phase}"
