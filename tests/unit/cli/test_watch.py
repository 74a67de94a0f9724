"""The command line's watch: resumed after each cut, begun anew where that is not possible, nothing shown twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from cotenant.cli import stream_retry
from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import note
from cotenant.cli.watch import Removed, changes
from cotenant.codec import errors
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter, WatchJobsRequest, WatchJobsResponse

CUT = errors.unavailable("cut")
COMPACTED = errors.Problem(grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED", "too old")
Answer = WatchJobsResponse | errors.Problem


def failure(problem: errors.Problem) -> grpc.aio.AioRpcError:
    details = errors.to_status(problem).SerializeToString()
    trailers = grpc.aio.Metadata((errors.DETAILS_KEY, details))
    return grpc.aio.AioRpcError(problem.code, grpc.aio.Metadata(), trailers, problem.message)


class Scripted:
    """A mesh whose watches answer from a script, one after the other."""

    def __init__(self, *watches: list[Answer]) -> None:
        self.watches, self.resumed_from = list(watches), list[str]()
        self.jobs = self
        self.report = note

    async def WatchJobs(self, request: WatchJobsRequest) -> AsyncIterator[WatchJobsResponse]:
        self.resumed_from.append(request.after_revision)
        for answer in self.watches.pop(0):
            if isinstance(answer, errors.Problem):
                raise failure(answer)
            yield answer

    async def find_again(self) -> None:
        """Stay where it is."""


def job(job_id: str, etag: str = "1", revision: str = "", **fields: Any) -> WatchJobsResponse:
    return WatchJobsResponse(jobs=[Job(id=job_id, etag=etag, **fields)], revision=revision)


def synced(revision: str) -> WatchJobsResponse:
    return WatchJobsResponse(synced=True, revision=revision)


def removed(job_id: str) -> WatchJobsResponse:
    return WatchJobsResponse(removed_job_ids=[job_id])


async def shown(*watches: list[Answer]) -> tuple[list[str], list[str]]:
    """Return what is shown, and the revisions from which watches are resumed."""
    mesh = Scripted(*watches)
    found = [one async for one in changes(cast("Mesh", mesh), JobFilter())]
    return [f"-{one.id}" if isinstance(one, Removed) else f"{one.id}{one.etag}" for one in found], mesh.resumed_from


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_retry, "RETRY_DELAYS_SECONDS", (0.0,) * 3)


async def test_a_cut_watch_is_resumed_where_it_was_cut_and_repeats_nothing() -> None:
    first: list[Answer] = [job("a"), job("b"), synced("5"), job("a", "2", revision="7"), job("b", "3"), CUT]
    again: list[Answer] = [
        job("a", "2", attained_gpu_seconds=9.0), job("b", "4"), removed("c"), synced("9"), removed("b"), CUT,
    ]  # fmt: skip
    assert await shown(first, again, [CUT], [synced("9")]) == (
        ["a1", "b1", "a2", "b3", "b4", "-b"],
        ["", "7", "9", "9"],
    )


async def test_a_change_back_to_an_earlier_state_is_shown() -> None:
    assert (await shown([job("a"), synced("5"), job("a"), job("a")]))[0] == ["a1", "a1", "a1"]


async def test_a_watch_that_cannot_be_resumed_begins_anew_and_tells_what_is_gone() -> None:
    first: list[Answer] = [job("a"), job("b"), job("c"), synced("5"), CUT]
    anew: list[Answer] = [job("a"), job("c", "2"), CUT]
    assert await shown(first, [COMPACTED], anew, [job("a"), job("c", "2"), job("d"), synced("9")]) == (
        ["a1", "b1", "c1", "c2", "d1", "-b"],
        ["", "5", "", ""],
    )


async def test_a_watch_that_is_cut_in_its_initial_state_tells_what_is_gone() -> None:
    assert (await shown([job("a"), job("b"), CUT], [job("b"), synced("5")]))[0] == ["a1", "b1", "-a"]


async def test_a_new_watch_that_is_refused_ends() -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await shown([COMPACTED])
