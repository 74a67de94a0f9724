"""Jobs and filters as users send them, read within a service's loop: accepted or refused, in little CPU time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf.message import DecodeError
from tests.unit.services.mesh import spec
from tests.verification.fuzz.inflater import PATTERNS, Inflater
from tests.verification.fuzz.loop_lag import run_in_slices
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.targets import Prepared, Target

from cotenant.codec import request_bytes, request_limits, specs
from cotenant.codec.errors import Problem
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.patterns import BadPattern, compile_pattern
from cotenant.core.model.validation import check_spec
from cotenant.rpc.decoding import decode
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

KNOWN = {"tenant": ["default"], "model": ["bert", ""], "role": ["worker", "ps"], "id": ["0t6czcnzd6ed"]}
REQUESTS: Mapping[str, Any] = {
    "JobService/CreateJob": pb.CreateJobRequest,
    "JobService/SimulateJob": pb.SimulateJobRequest,
    "JobService/ListJobs": pb.ListJobsRequest,
    "JobService/UpdateJob": pb.UpdateJobRequest,
    "ArrayService/CreateArray": array_pb.CreateArrayRequest,
    "ArrayService/ListArrays": array_pb.ListArraysRequest,
}
WITH_SPEC = (pb.CreateJobRequest, pb.SimulateJobRequest, array_pb.CreateArrayRequest)
LINES = ("a" * 4096, "step 5 loss 0.5", "0123456789" * 400, "x" * 300 + "é" * 300)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("user requests", _requests, (Problem,), in_loop=True)
    yield Target("patterns", _patterns, (BadPattern,), in_loop=True)


def _requests(directory: Path) -> Prepared:
    def pack(data: bytes) -> bytes:
        rng = Random(data)
        name = rng.choice(sorted(REQUESTS))
        request = REQUESTS[name]()
        if isinstance(request, WITH_SPEC):
            request.spec.CopyFrom(_spec(rng))
        if isinstance(request, pb.SimulateJobRequest):
            request.more.append(_spec(rng))
        if isinstance(request, pb.UpdateJobRequest):
            request.job.spec.CopyFrom(_spec(rng))
            request.update_mask.paths.append("spec.labels")
        Inflater(rng, Drawer(rng, KNOWN)).inflate(request)
        return name.encode() + b"\n" + bytes(request.SerializeToString())

    return Prepared(read, (b"0", b"1", b"abc"), pack=pack)


def read(data: bytes) -> None:
    """Read a request as a service does: check its limits, decode it, and validate its first job."""
    name, _, sent = data.partition(b"\n")
    kind = REQUESTS.get(name.decode(errors="replace"), pb.CreateJobRequest)
    request_bytes.check_bytes(f"/cotenant.v1.{name.decode(errors='replace')}", sent)
    try:
        request: Any = run_in_slices(decode(kind, sent))  # as in a server, where other calls take turns
    except DecodeError:
        return  # reported by the guard
    request_limits.check(request)
    if isinstance(request, WITH_SPEC):
        _accept(request.spec)
    if isinstance(request, pb.UpdateJobRequest):
        _accept(request.job.spec)


def _accept(message: job_pb2.JobSpec) -> None:
    accepted = specs.accept_spec(message, now=time.time())
    if check_spec(accepted):
        raise AssertionError("accepted, but invalid")


def _spec(rng: Random) -> job_pb2.JobSpec:
    made = spec(gpus=rng.choice((0, 1, 4)))
    made.kind = job_pb2.JOB_KIND_TRAINING if made.roles[0].resources.gpu_milli else job_pb2.JOB_KIND_CPU
    made.progress.regex = rng.choice((r"step (\d+)", "", *PATTERNS))[:1024]
    made.labels["a"], made.environment["A"] = "b", "c"
    if rng.random() < 0.5:
        made.array.ranges.add(first=0, last=rng.choice((9, 9_999)), step=1)
    if rng.random() < 0.5:
        made.dependencies.add(id="0t6czcnzd6ed", condition=1)
    return made


def _patterns(directory: Path) -> Prepared:
    def run(data: bytes) -> None:
        text = data.decode(errors="replace")[:2_000]
        found = check_spec(JobSpec(command=("x",), roles=(Role(request=Request(1000)),), progress_regex=text))
        if found and not found[0].description:
            raise AssertionError("refused without a message")
        compile_pattern(text)

    seeds = (rb"step (\d+)", rb"iter (\d+)/\d+ loss (?P<loss>[\d.]+)", *(one.encode() for one in PATTERNS))
    return Prepared(run, seeds, (b"{1,1000}", rb"\pL", b"(?:", b"*", b"+?", b"|", b"[^x]", b"(?i)", rb"\C", b"\\1"))
