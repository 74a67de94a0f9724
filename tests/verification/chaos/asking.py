"""How those who use a mesh in trouble ask: until there is an answer, and each answer is written down."""

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
ALREADY_ENDED = frozenset({grpc.StatusCode.FAILED_PRECONDITION})  # what is said of what has ended
UNEXPECTED = frozenset(  # what chaos is no reason for
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
ARCHIVED = frozenset(  # what is said of what ended long ago, where its archive is not whoever answers'
    {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION}
)
NO_CODES: frozenset[grpc.StatusCode] = frozenset()


@dataclass
class CallLog:
    """What all who ask have in common. Once it is hushed nothing is to be begun any more."""

    directory: Path
    name: str
    refusals: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    busy: int = 0  # so many do something that is to be done before it is calm
    quiescing: asyncio.Event = field(default_factory=asyncio.Event)

    def request(self) -> str:
        """Make a request id."""
        self.requests += 1
        return f"{self.name} {self.requests}"

    async def pause(self, seconds: tuple[float, float], rng: Random) -> None:
        """Let some time pass, less where all is to come to rest."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.quiescing.wait(), rng.uniform(*seconds))

    async def call(self, method: Any, request: Any) -> Any:
        """Ask until there is an answer."""
        return await self.call_unless(NO_CODES, method, request)

    async def call_unless(self, accepted: Container[grpc.StatusCode], method: Any, request: Any) -> Any:
        """Ask until there is an answer; None where it is a refusal that is accepted."""
        while True:
            try:
                if (answer := await method(request, timeout=CALL_SECONDS_MAX)) is not None:
                    return answer
                self.refusals["unreadable"] += 1  # its bytes were garbled: gRPC gives nothing then, and says nothing
            except grpc.aio.AioRpcError as error:
                if error.code() in accepted:
                    return None
                self.refusals[error.code().name] += 1
                if error.code() in UNEXPECTED:
                    self.record(wrong=f"{type(request).__name__}: {error.code().name}: {error.details()}")
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    def record(self, **what: object) -> None:
        """Write down what a user knows now."""
        with (self.directory / ANSWERS).open("ab", buffering=0) as file:
            file.write(json.dumps({"at": clock(), **what}).encode() + b"\n")
