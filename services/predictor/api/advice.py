"""Advice on request: plans of snapshots that callers send, each made in a process that ends with its call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from cotenant.codec import errors, specs
from cotenant.codec.errors import Problem, Violation
from cotenant.security.identity import caller
from cotenant.v1 import advice_service_pb2 as pb
from cotenant.v1 import advice_service_pb2_grpc as pb_grpc

SERVICE = "cotenant.v1.AdviceService"
COMMAND = (sys.executable, "-P", "-m", "cotenant.simulator.plan_process")
RUNS_MAX = 2  # in all; a caller has one at a time
NODES_MAX, JOBS_MAX = 2_000, 5_000
SNAPSHOT_BYTES_MAX = 3 * 2**20
SECONDS_MAX = 20.0  # for the forecast
CALL_SECONDS_MAX = 50.0
CPU_SECONDS_MAX = 45


class AdviceServicer(pb_grpc.AdviceServiceServicer):
    """Plans snapshots."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._running: set[str] = set()  # callers

    async def PlanJobs(self, request: pb.PlanJobsRequest, context: Any) -> pb.PlanJobsResponse:
        """Plan the waiting jobs of a snapshot."""
        question = _question(request)
        async with self._turn(caller().name):
            told = await self._ask(json.dumps(question).encode() + b"\n" + request.snapshot)
        if "error" in told:
            raise errors.invalid([Violation(told["field"], told["error"])])
        if "failed" in told:
            raise errors.failed_precondition("POLICY_FAILED", told["failed"])
        return await asyncio.to_thread(ParseDict, told["plan"], pb.PlanJobsResponse())

    @contextlib.asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        if name in self._running or len(self._running) >= RUNS_MAX:
            why = "a plan of yours is being made" if name in self._running else f"{RUNS_MAX} plans are being made"
            raise Problem(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUSY", f"{why}, and no more at once; try again soon")
        self._running.add(name)
        try:
            yield
        finally:
            self._running.discard(name)

    async def _ask(self, document: bytes) -> dict[str, Any]:
        """Return what the process of a plan answers; it is killed if the call ends first."""
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        try:
            async with asyncio.timeout(CALL_SECONDS_MAX):
                printed, _ = await process.communicate(document)
        except TimeoutError:
            raise errors.failed_precondition("TOO_LARGE", f"the plan took longer than {CALL_SECONDS_MAX:g} s") from None
        finally:
            await _kill(process)
        if process.returncode:
            raise errors.failed_precondition("TOO_LARGE", _in_words(process.returncode))
        told: dict[str, Any] = json.loads(printed)
        return told


def _question(request: pb.PlanJobsRequest) -> dict[str, Any]:
    """Return what the process is asked besides the snapshot.

    Raises:
        Problem: INVALID_ARGUMENT, naming each invalid field.
    """
    wrong: list[Violation] = []
    if len(request.snapshot) > SNAPSHOT_BYTES_MAX:
        what = f"has {len(request.snapshot):,} bytes, more than {SNAPSHOT_BYTES_MAX:,}; `cotenant plan` has no limit"
        wrong.append(Violation("snapshot", what))
    options: dict[str, dict[str, str]] = {}
    for name, value in sorted(request.options.items()):
        group, dot, key = name.partition(".")
        if not (group and dot and key):
            wrong.append(Violation("options", f"{name[:80]!r} must be written group.key"))
        options.setdefault(group, {})[key] = value
    if wrong:
        raise errors.invalid(wrong)
    budget = specs.seconds(request.budget) if request.HasField("budget") else SECONDS_MAX
    return {
        "profile": request.profile,
        "policies": dict(request.policies),
        "options": options,
        "nodes_max": NODES_MAX,
        "jobs_max": JOBS_MAX,
        "seconds_max": max(0.0, min(budget, SECONDS_MAX)),
        "cpu_seconds_max": CPU_SECONDS_MAX,
        "seed": request.seed,
    }


def _in_words(code: int) -> str:
    if code == -signal.SIGXCPU:
        return f"the plan used all of its {CPU_SECONDS_MAX} s of processor time; `cotenant plan` has no limit"
    return f"the process of the plan ended with code {code}; the service's log says why"


async def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
