"""`scancel`: cancels jobs, or signals them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotenant.cli.connection import Mesh, command_error
from cotenant.cli.slurm.arguments import read
from cotenant.cli.slurm.finding import call, list_jobs
from cotenant.cli.slurm.job_ids import INVALID, read_ids
from cotenant.cli.slurm.outcome import FAILED, SlurmError, show
from cotenant.cli.slurm.states import LIVE_PHASES, read_states, state_of
from cotenant.cli.slurm.users import user_name
from cotenant.codec.errors import from_error
from cotenant.core.model.job_number import SEPARATOR, number_of
from cotenant.deferred import grpc
from cotenant.v1.array_service_pb2 import CancelArrayRequest
from cotenant.v1.job_service_pb2 import CancelJobRequest, JobFilter

NAME = "scancel"
OPTIONS = {
    "u": "user=", "user": "user=", "me": "me", "n": "name=", "name": "name=", "jobname": "name=", "t": "state=",
    "state": "state=", "A": "account=", "account": "account=", "p": "partition=", "partition": "partition=",
    "s": "signal=", "signal": "signal=", "b": "batch", "batch": "batch", "f": "full", "full": "full", "Q": "quiet",
    "quiet": "quiet", "v": "verbose", "verbose": "verbose", "w": "nodelist=", "nodelist": "nodelist=", "H": "hurry",
    "hurry": "hurry", "help": "help",
}  # fmt: skip
_SELECTING = ("user", "me", "name", "state", "account", "partition")
_ENDING_SIGNALS = ("", "TERM", "KILL", "15", "9")


def main(words: Sequence[str]) -> int:
    """Cancel jobs and return the exit code.

    Raises:
        SlurmError: an option is invalid, or no job is named.
    """
    given, others = read(NAME, words, OPTIONS)
    if "help" in given:
        print("Usage: scancel [-u USER] [--me] [-n NAME] [-t STATE] [-A ACCOUNT] [JOB…]\nCancels jobs of Cotenant.")
        return 0
    if not others and given.keys().isdisjoint(_SELECTING):
        raise SlurmError("No job identification provided")
    if given.get("signal", "").upper().removeprefix("SIG") not in _ENDING_SIGNALS:
        raise SlurmError(f"Jobs can be cancelled, but not sent another signal: {given['signal']}")
    job_ids = [job_id for text in others for job_id in read_ids(text)]
    failures = call(lambda mesh: _cancel(mesh, given, job_ids))
    for job_id, text in failures.items():
        if "quiet" not in given or INVALID not in text:
            number = str(number_of(job_id.partition(SEPARATOR)[0])) + job_id[12:]
            show(NAME, SlurmError(f"Kill job error on job id {number}: {text}"))
    return FAILED if failures else 0


async def _cancel(mesh: Mesh, given: Mapping[str, str], job_ids: Sequence[str]) -> dict[str, str]:
    """Cancel the named jobs and arrays, or those of them that the options select; return why some were not."""
    wanted = list(job_ids)
    if not given.keys().isdisjoint(_SELECTING):
        selected = await _selected(mesh, given)
        wanted = [
            job_id
            for job_id in selected
            if not job_ids or job_id in job_ids or job_id.partition(SEPARATOR)[0] in job_ids
        ]
    failures: dict[str, str] = {}
    for job_id in wanted:
        try:
            await _cancel_one(mesh, job_id)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise
            problem = {"NOT_FOUND": INVALID, "PERMISSION_DENIED": "Access/permission denied"}.get(code)
            failures[job_id] = problem or command_error(from_error(error)).message
    return failures


async def _cancel_one(mesh: Mesh, job_id: str) -> None:
    try:
        await mesh.jobs.CancelJob(CancelJobRequest(id=job_id))
    except grpc.aio.AioRpcError as error:
        if from_error(error).reason != "IS_ARRAY":
            raise
        await mesh.arrays.CancelArray(CancelArrayRequest(id=job_id))


async def _selected(mesh: Mesh, given: Mapping[str, str]) -> list[str]:
    """Return the ids of the jobs that the options select: the caller's, unless they name another user."""
    users = [name for name in given.get("user", "").split(",") if name]
    own = "me" in given or not users or users == [user_name()]
    states = read_states(given["state"]) if "state" in given else None
    wanted = JobFilter(own_only=own, phases=LIVE_PHASES, name=given.get("name", ""), tenant=given.get("account", ""))
    return [
        job.id
        for job in await list_jobs(mesh, wanted)
        if (own or job.submitter in users)
        and (states is None or state_of(job) in states)
        and ("partition" not in given or job.spec.queue == given["partition"])
    ]
