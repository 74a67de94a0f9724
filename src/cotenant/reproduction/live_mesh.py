"""A real mesh of its own in a child process, and jobs that run on it to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import grpc

from cotenant.codec import specs
from cotenant.codec.errors import from_error
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.reproduction.model import Stopped
from cotenant.rpc.access import find
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import CancelJobRequest, CreateJobRequest, ListJobsRequest
from cotenant.v1.job_service_pb2_grpc import JobServiceStub
from cotenant.v1.node_service_pb2 import NODE_STATE_READY, ListNodesRequest
from cotenant.v1.node_service_pb2_grpc import NodeServiceStub

START_SECONDS_MAX, CALL_SECONDS_MAX, POLL_SECONDS = 120.0, 20.0, 0.1
COMMAND = "from cotenant.cli.main import main; main()"
T = TypeVar("T")


class LiveFailed(Exception):
    """The mesh failed; the message is one sentence."""


class LiveStopped(Exception):
    """Stopped by the user."""


@dataclass(frozen=True, slots=True)
class Ran:
    """An ended job: when it was submitted, assigned its resources, and ended; unix seconds."""

    submitted_seconds: float
    assigned_seconds: float
    ended_seconds: float


class Live:
    """Submits jobs to a mesh."""

    def __init__(self, state_dir: Path, log: Path, process: subprocess.Popen[bytes]) -> None:
        self._state_dir, self._log, self._process = state_dir, log, process

    def wait_until_up(self) -> None:
        """Wait until its node accepts jobs.

        Raises:
            LiveFailed: the mesh ended, or took too long.
        """
        self._until(self._ready, time.monotonic() + START_SECONDS_MAX, "the mesh did not come up")

    def run(
        self, jobs: Sequence[tuple[float, JobSpec]], *, seconds_max: float, stopped: Stopped = lambda: False
    ) -> list[Ran]:
        """Submit jobs, each at its offset from the first, and wait until all have ended; none is left running.

        A deadline counts from the submission of its job.

        Raises:
            LiveFailed: a job did not succeed, or they took too long.
            LiveStopped: stopped.
        """
        begin, ids = time.monotonic(), []
        with self._channel() as channel:
            stub, calling = JobServiceStub(channel), self._calling()
            try:
                for after_seconds, spec in jobs:
                    time.sleep(max(0.0, begin + after_seconds - time.monotonic()))
                    if spec.deadline_seconds is not None:
                        spec = replace(spec, deadline_seconds=time.time() + spec.deadline_seconds)
                    wire = specs.spec_to_wire(spec)
                    ids.append(stub.CreateJob(CreateJobRequest(spec=wire), **calling).job.id)
                slow = f"jobs were not done in {seconds_max:g} s"
                ended = self._until(lambda: self._done(stub, ids, stopped), begin + seconds_max, slow)
            except grpc.RpcError as error:
                raise LiveFailed(f"a job could not be submitted: {from_error(error).message}") from error
            finally:
                self._end(stub, ids)
        return [_ran(ended[job_id]) for job_id in ids]

    def _done(self, stub: JobServiceStub, ids: Sequence[str], stopped: Stopped) -> dict[str, Job]:
        """Return the jobs once all have succeeded; empty before."""
        if stopped():
            raise LiveStopped
        jobs = self._jobs(stub, ids)
        for job in jobs.values():
            if _phase(job) in ENDED and _phase(job) is not Phase.SUCCEEDED:
                raise LiveFailed(f"job {job.spec.name} {_phase(job).value}: {job.phase_reason}")
        return jobs if all(_phase(job) in ENDED for job in jobs.values()) else {}

    def _end(self, stub: JobServiceStub, ids: Sequence[str]) -> None:
        """Cancel unfinished jobs and wait for their end, so that no process outlives its mesh."""
        with suppress(grpc.RpcError, LiveFailed):
            left = [job_id for job_id, job in self._jobs(stub, ids).items() if _phase(job) not in ENDED]
            for job_id in left:
                stub.CancelJob(CancelJobRequest(id=job_id), **self._calling())
            self._until(
                lambda: all(_phase(job) in ENDED for job in self._jobs(stub, left).values()),
                time.monotonic() + CALL_SECONDS_MAX,
                "jobs did not end",
            )

    def _jobs(self, stub: JobServiceStub, ids: Sequence[str]) -> dict[str, Job]:
        wanted = ListJobsRequest(page_size=1000)
        found: dict[str, Job] = {}
        while True:
            answer = stub.ListJobs(wanted, **self._calling())
            found |= {job.id: job for job in answer.jobs if job.id in ids}
            wanted.page_token = answer.next_page_token
            if not wanted.page_token:
                return found

    def _ready(self) -> bool:
        if not (self._state_dir / "endpoint.json").exists():
            return False
        with self._channel() as channel:
            answer = NodeServiceStub(channel).ListNodes(ListNodesRequest(), **self._calling())
            return any(node.state == NODE_STATE_READY for node in answer.nodes)

    def _until(self, look: Callable[[], T], deadline: float, otherwise: str) -> T:
        while True:
            with suppress(grpc.RpcError):
                if found := look():
                    return found
            if self._process.poll() is not None:
                said = self._log.read_text(errors="replace").strip().splitlines()
                raise LiveFailed(f"the mesh ended: {said[-1] if said else 'without output'}")
            if time.monotonic() > deadline:
                raise LiveFailed(otherwise)
            time.sleep(POLL_SECONDS)

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(find(self._state_dir, {}).endpoints.queue)

    def _calling(self) -> dict[str, object]:
        token = find(self._state_dir, {}).token
        return {"metadata": (("authorization", f"Bearer {token}"),), "timeout": CALL_SECONDS_MAX}


@contextmanager
def mesh(directory: Path, cpus: Sequence[int], flags: Sequence[str]) -> Iterator[Live]:
    """Run `cotenant up` on some CPUs with its own state in a directory, and stop it in the end.

    Raises:
        LiveFailed: it does not come up.
    """
    state_dir, log = directory / "state", directory / "up.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COTENANT_")}
    command = [sys.executable, "-c", COMMAND, "--state-dir", str(state_dir), "up", *flags]
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)  # the child inherits it
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # we handle Ctrl-C: first its jobs end, then the mesh
            )
    finally:
        os.sched_setaffinity(0, allowed)
    try:
        live = Live(state_dir, log, process)
        live.wait_until_up()
        yield live
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(CALL_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _phase(job: Job) -> Phase:
    return specs.PHASES.from_wire(job.phase)


def _ran(job: Job) -> Ran:
    return Ran(
        job.create_time.ToNanoseconds() / 1e9,
        job.attempt.assign_time.ToNanoseconds() / 1e9,
        job.end_time.ToNanoseconds() / 1e9,
    )
