"""A client that retries each call until it is answered, and records every answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio

from cotenant.history.recording import clock

ANSWERS = "answers"
RETRY_SECONDS, CALL_SECONDS_MAX, PAUSE_SECONDS = 0.2, 10.0, 0.1
PAGE = 1000
ALREADY_ENDED = frozenset({grpc.StatusCode.FAILED_PRECONDITION})  # refusals for a job that has ended
UNEXPECTED = frozenset(  # codes that faults do not explain
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
ARCHIVED = frozenset(  # refusals for a job that ended long ago, if another replica has archived it
    {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
)
NO_CODES: frozenset[grpc.StatusCode] = frozenset()


@dataclass
class CallLog:
    """State shared by all clients. Once `quiescing` is set, no new work begins."""

    directory: Path
    name: str
    refusals: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    busy: int = 0  # tasks to be finished before the load is idle
    quiescing: asyncio.Event = field(default_factory=asyncio.Event)

    def request(self) -> str:
        """Return a new request ID."""
        self.requests += 1
        return f"{self.name} {self.requests}"

    async def pause(self, seconds: tuple[float, float], rng: Random) -> None:
        """Wait for a random time in this range, or until quiescing."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.quiescing.wait(), rng.uniform(*seconds))

    async def call(self, method: Any, request: Any) -> Any:
        """Retry until answered."""
        return await self.call_unless(NO_CODES, method, request)

    async def call_unless(self, accepted: Container[grpc.StatusCode], method: Any, request: Any) -> Any:
        """Retry until answered; return None for an accepted refusal."""
        while True:
            try:
                if (answer := await method(request, timeout=CALL_SECONDS_MAX)) is not None:
                    return answer
                self.refusals["unreadable"] += 1  # its bytes were garbled: gRPC returns None without an error
            except grpc.aio.AioRpcError as error:
                if error.code() in accepted:
                    return None
                self.refusals[error.code().name] += 1
                if error.code() in UNEXPECTED:
                    self.record(wrong=f"{type(request).__name__}: {error.code().name}: {error.details()}")
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    def record(self, **what: object) -> None:
        """Record what a user knows now."""
        with (self.directory / ANSWERS).open("ab", buffering=0) as file:
            file.write(json.dumps({"at": clock(), **what}).encode() + b"\n")
