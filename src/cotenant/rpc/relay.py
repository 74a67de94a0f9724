"""Metadata and status of calls that one process relays to another: to the leader, or to the service that answers."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn, cast

import grpc.aio

from cotenant.security import audit
from cotenant.security.audit import CALL, FORWARDED, ROUTED
from cotenant.security.identity import ANYONE, CALLER, caller, on_behalf_header

HOP_METADATA = ("user-agent", "te", "content-type", FORWARDED, CALL)  # metadata of one hop, not relayed


def relayed_metadata(context: Any, address: str, mark: str) -> tuple[tuple[str, Any], ...]:
    """Return the metadata for a call that is relayed to an address.

    A bearer token identifies the caller there as well. A certificate cannot be relayed, so the answering process is
    sent the identity of its holder. Its audit log uses the same call ID as the one here. `mark` is the metadata key
    that keeps the call from being relayed again in the same way.
    """
    told = context.invocation_metadata() or ()
    dropped = {*HOP_METADATA, mark}
    kept = [(key, value) for key, value in told if key not in dropped and not key.startswith("grpc-")]
    if caller() != ANYONE and all(key != "authorization" for key, _ in kept):
        kept = [(key, value) for key, value in kept if key != CALLER]
        kept.append(on_behalf_header(caller()))
    return (*kept, (mark, "1"), (CALL, audit.record_forwarding(address)))


def is_forwarded(context: Any) -> bool:
    """Return whether another replica forwarded this call to the process it took for the leader."""
    return any(key == FORWARDED for key, _ in context.invocation_metadata() or ())


def is_routed(context: Any) -> bool:
    """Return whether another process routed this call to the process it took for the service."""
    return any(key == ROUTED for key, _ in context.invocation_metadata() or ())


def is_ended() -> bool:
    """Return whether the caller itself has cancelled the current call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def relay_error(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    """End a call with the status of the relayed call."""
    trailers = cast("Any", tuple(error.trailing_metadata() or ()))
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailers)
    raise AssertionError("abort raises")
