"""The files of a job's working directory, as commands read them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.name_lookup import find_job
from cotenant.cli.outcome import CommandError, sanitize, usage_error
from cotenant.codec.errors import from_error
from cotenant.v1.job_pb2 import FilePart, FileSelection, Job
from cotenant.v1.job_service_pb2 import ReadFilesRequest

NO_FILES = "NO_OUTPUT"  # the reason of an answer


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which files of which attempt."""

    job: str
    path: bytes
    attempt: int = 0
    rank: int = 0


def parse_place(text: str) -> tuple[str, bytes]:
    """Return the job and the path of `ID:PATH`; the path is relative, and empty for the whole directory.

    >>> parse_place("0abc_3:out/model.pt"), parse_place("0abc:"), parse_place("0abc:./out/")
    (('0abc_3', b'out/model.pt'), ('0abc', b''), ('0abc', b'out'))
    """
    job, colon, path = text.partition(":")
    if not colon or not job:
        raise usage_error(
            f"{sanitize(text)!r} names no file of a job", hint="write ID:PATH, such as ID:out/model.pt, or ID: for all"
        )
    return job, clean_path(path)


def clean_path(path: str) -> bytes:
    """Return a path within a working directory in its shortest form.

    Raises:
        CommandError: it is absolute, or leads out.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts:
        raise usage_error(f"{sanitize(path)!r}: a path is relative to the job's working directory, and stays in it")
    return os.fsencode("/".join(parts))


async def read_parts(mesh: Mesh, wanted: Wanted, *, list_only: bool = False) -> AsyncIterator[FilePart]:
    """Yield what the job's node sends.

    Raises:
        CommandError: there is no such job.
        AioRpcError: there are no such files, or they cannot be read.
    """
    job = await find_job(mesh, wanted.job)
    selection = FileSelection(path=wanted.path, list_only=list_only)
    request = ReadFilesRequest(id=job.id, attempt=wanted.attempt, rank=wanted.rank, files=selection)
    count = 0
    try:
        async for response in mesh.jobs.ReadFiles(request):
            count += 1
            yield response.part
    except grpc.aio.AioRpcError as error:
        if not count and from_error(error).reason == NO_FILES and _ran_in_folder(job):
            folder = sanitize(job.spec.submit_directory.path)
            raise CommandError(
                f"job {job.id} started in your folder {folder}, and its files are there",
                hint="with --upload . a job gets a copy of the folder, whose files `cotenant cp` fetches",
            ) from None
        raise
    if count == 1 and not wanted.path:
        mesh.report(f"the working directory is empty{_elsewhere(job)}")
    if not count:
        raise CommandError(f"{job.id}: its node has sent nothing")


def _ran_in_folder(job: Job) -> bool:
    return bool(job.spec.submit_directory.path) and not job.spec.upload and not job.spec.working_directory


def _elsewhere(job: Job) -> str:
    folder = job.spec.submit_directory.path
    return f"; on a node that has {sanitize(folder)}, the job runs there" if folder else ""


def shown(path: bytes) -> str:
    """Return a path made safe for a terminal."""
    return sanitize(path.decode(errors="replace"))
