"""The users of a mesh in trouble: they submit jobs of all forms and cancel some, and write down each answer.

A process of its own, on its own machine: `python -m tests.chaos.load DIRECTORY QUEUE SEED`. It obeys lines on its
standard input: `hush` (submit no more, and say `calm` once all that was acknowledged has ended), `go` and the end of
the input. Whatever is not answered is asked again under the same request id, and so is now and then what was.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import grpc
import grpc.aio
from benchmarks.kill_mesh import JOB

from cotenant.core.arrays import ArraySpec, IndexRange
from cotenant.core.jobs import JobKind, JobSpec, Request, Role
from cotenant.core.lifecycle import ENDED
from cotenant.history.recording import clock
from cotenant.rpc import channel, translate
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

ANSWERS, CALM = "answers", "calm"
UNFINISHED = 14
RETRY_SECONDS, CALL_SECONDS_MAX, PAUSE_SECONDS = 0.2, 10.0, 0.1
CANCELLED, REPEATED, LONG, ALONE = 0.12, 0.1, 0.1, 0.04
STOP_AFTER_SECONDS = 10.0  # without the control plane, where a job must never run twice: the least that is taken
SECONDS, LONG_SECONDS, ALONE_SECONDS = (0.05, 0.8), (3.0, 8.0), (6.0, 14.0)
RETRIES_MAX = 1000
PAGE = 1000
WRONG = (  # what chaos is no reason for
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
)


@dataclass
class Load:
    """Keeps some jobs unfinished."""

    directory: Path
    stub: Any
    rng: Random
    name: str
    open: set[str] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    hushed: bool = False
    busy: int = 0

    async def run(self) -> None:
        """Submit until the end of the input."""
        asyncio.get_running_loop().create_task(self._follow())
        while True:
            if not self.hushed and len(self.open) + self.busy < UNFINISHED:
                asyncio.get_running_loop().create_task(self._live())
            await asyncio.sleep(PAUSE_SECONDS)

    async def _live(self) -> None:
        """Submit a job, and perhaps change one's mind."""
        self.busy += 1
        try:
            self.requests += 1
            request_id, rng = f"{self.name} {self.requests}", Random(f"{self.name} {self.requests}")
            spec, replicas = a_job(self.directory, rng)
            alone = spec.stop_after_disconnected_seconds is not None
            request = pb.CreateJobRequest(spec=translate.spec_to_wire(spec), request_id=request_id)
            answer = (await self._call(self.stub.CreateJob, request)).job
            if rng.random() < REPEATED:
                again = (await self._call(self.stub.CreateJob, request)).job
                self._tell(request=f"{request_id}", job=again.id, replicas=replicas, alone=alone)
            ids = [answer.id]
            if spec.array:
                ids = [f"{answer.spec.array_task.array_id}_{index}" for index in spec.array.indices]
            for job_id in ids:
                self._tell(
                    request=request_id if job_id == answer.id else f"{request_id} {job_id}",
                    job=job_id,
                    replicas=replicas,
                    alone=alone,
                )
            self.open |= set(ids)
            if rng.random() < CANCELLED:
                await asyncio.sleep(rng.uniform(0, 2))
                self._tell(cancel=ids)
                cancel = pb.CancelJobRequest(
                    id=answer.spec.array_task.array_id or answer.id, request_id=f"{request_id} cancel"
                )
                await self._call(self.stub.CancelJob, cancel)
        finally:
            self.busy -= 1

    async def _call(self, method: Any, request: Any) -> Any:
        """Ask until there is an answer."""
        while True:
            try:
                return await method(request, timeout=CALL_SECONDS_MAX)
            except grpc.aio.AioRpcError as error:
                self.refusals[error.code().name] += 1
                if error.code() in WRONG:
                    self._tell(wrong=f"{type(request).__name__}: {error.code().name}: {error.details()}")
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self) -> None:
        """Take note of what has ended."""
        ended = [translate.PHASES.to_wire(phase) for phase in ENDED]
        said = False
        while True:
            if self.open:
                await self._look(ended)
            if self.hushed and not self.open and not self.busy:
                if not said:
                    print(json.dumps({CALM: True, "refusals": self.refusals}), flush=True)
                said = True
            else:
                said = False
            await asyncio.sleep(PAUSE_SECONDS * 2)

    async def _look(self, ended: list[Any]) -> None:
        request = pb.ListJobsRequest(page_size=PAGE, filter=pb.JobFilter(phases=ended))
        answer = await self._call(self.stub.ListJobs, request)
        self.open -= {job.id for job in answer.jobs}

    def _tell(self, **what: object) -> None:
        """Write down what a user knows now."""
        with (self.directory / ANSWERS).open("ab", buffering=0) as file:
            file.write(json.dumps({"at": clock(), **what}).encode() + b"\n")


def a_job(directory: Path, rng: Random) -> tuple[JobSpec, int]:
    """Draw a job; and of how many processes it is."""
    replicas, gpus = rng.choice([(1, 1), (1, 1), (1, 0), (1, 0), (2, 1), (3, 1), (2, 0)])
    alone = rng.random() < ALONE
    seconds = rng.uniform(*(ALONE_SECONDS if alone else LONG_SECONDS if rng.random() < LONG else SECONDS))
    array = ArraySpec((IndexRange(0, rng.randint(1, 3)),)) if rng.random() < 0.1 and replicas == 1 else None
    words = (str(directory / "job.py"), str(directory), f"{seconds:.3f}", "daemon" if rng.random() < 0.3 else "alone")
    spec = JobSpec(
        name="victim",
        kind=JobKind.TRAINING if gpus else JobKind.CPU,
        roles=(Role(replicas=replicas, request=Request(gpu_milli=1000 * gpus, cores=1)),),
        command=(sys.executable, "-I", "-S", *words, "apart"),
        grace_seconds=2.0,
        retries_max=RETRIES_MAX,
        array=array,
        stop_after_disconnected_seconds=STOP_AFTER_SECONDS if alone else None,
    )
    return spec, replicas


def prepare(directory: Path) -> None:
    """Write what jobs run."""
    (directory / "held").mkdir()
    (directory / "job.py").write_text(JOB)


async def main(directory: Path, queue: str, seed: str) -> None:
    """Do it all."""
    async with channel.connect(queue, os.environ["COTENANT_TOKEN"]) as connection:
        load = Load(directory, cast("Any", JobServiceStub(connection)), Random(seed), f"chaos {seed}")
        running = asyncio.get_running_loop().create_task(load.run())
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for line in reader:
            load.hushed = line.strip() == b"hush"
        running.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:4]))
