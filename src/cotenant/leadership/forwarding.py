"""Forwards calls to the leader unchanged (bytes, metadata, deadline) and relays its answer or status unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio

from cotenant.codec import errors
from cotenant.codec.method_rules import UNKNOWN_METHOD, MethodRules
from cotenant.codec.method_table import METHOD_RULES
from cotenant.leadership.election import Election
from cotenant.leadership.leadership_term import Leader
from cotenant.rpc.channel import certificate_generation, forwarding_channel
from cotenant.rpc.relay import is_ended, is_forwarded, relay_error, relayed_metadata
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.security import audit
from cotenant.security.audit import FORWARDED

PATIENCE_SECONDS = 5.0  # how long a call waits for a leader: longer than an election
PAUSE_SECONDS = 0.05  # before a retry
ABANDON_SECONDS = 1.0  # grace for calls to a replaced leader; a halted leader never ends them itself


class Forwarder:
    """Forwards calls to the leader.

    A call is retried if nothing was done (the leader answered that it no longer leads) or if a retry is harmless, until
    a leader answers or the deadline passes. When the leader changes, calls to the previous leader are abandoned: it may
    be halted with all its connections open, and would never send an answer or end a stream.
    """

    def __init__(self, election: Election, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._election, self._patience_seconds = election, patience_seconds
        self._connected_to = "", 0
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._in_flight: dict[Any, str] = {}  # by call: the address that answers it

    def follow(self, leader: Leader | None) -> None:
        """Abandon, after a short grace, the calls that were forwarded to a replaced leader."""
        if leader is None:
            return  # it may be elected again
        for call in [call for call, address in self._in_flight.items() if address != leader.address]:
            del self._in_flight[call]
            asyncio.get_running_loop().call_later(ABANDON_SECONDS, call.cancel)

    def deadline_of(self, context: Any) -> float:
        """Return until when a call may wait for a leader, in event-loop time."""
        left, wait_seconds = context.time_remaining(), self._patience_seconds
        if left is not None and left < wait_seconds:
            wait_seconds = left
        return asyncio.get_running_loop().time() + wait_seconds

    async def leader(self, context: Any, deadline: float) -> Leader:
        """Return the leader; wait for one until the deadline.

        Raises:
            Problem: UNAVAILABLE, NO_LEADER: no leader was found in time.
            StoreRegressed, StoreReplaced: no leader can be elected because the store is not the one that was written.
        """
        if is_forwarded(context):
            raise errors.unavailable("this replica is not the leader", PAUSE_SECONDS, errors.NOT_LEADER)
        if self._election.leader is not None:
            return self._election.leader
        self._election.check_store()
        try:
            async with asyncio.timeout_at(deadline):
                while (leader := self._election.leader) is None:
                    await self._election.changed()
        except TimeoutError:
            raise errors.unavailable(
                f"this service has no reachable leader ({self._election.key}); nothing was done",
                reason=errors.NO_LEADER,
            ) from None
        return leader

    async def answer(self, leader: Leader, path: str, request: Any, context: Any, deadline: float) -> bytes | None:
        """Forward a call with a single response; return None if the caller should retry."""
        streams = not isinstance(request, bytes)
        channel = self._to(leader)
        make: Any = channel.stream_unary if streams else channel.unary_unary
        metadata = relayed_metadata(context, leader.address, FORWARDED)
        call = make(path)(request, metadata=metadata, timeout=context.time_remaining())
        self._in_flight[call] = leader.address
        try:
            response: bytes = await call
        except asyncio.CancelledError:
            if is_ended():
                raise
            if streams or not METHOD_RULES.get(path, UNKNOWN_METHOD).retried:
                raise _replaced() from None
            return None
        except grpc.aio.AioRpcError as error:
            if not streams and _may_retry(error, METHOD_RULES.get(path, UNKNOWN_METHOD)):
                await self._pause(deadline)
                return None
            await _relay_status(context, error)
        finally:
            self._in_flight.pop(call, None)
            call.cancel()
        context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
        return response

    async def stream(self, leader: Leader, path: str, request: Any, context: Any) -> AsyncIterator[bytes]:
        """Forward a call with a response stream."""
        channel = self._to(leader)
        make: Any = channel.unary_stream if isinstance(request, bytes) else channel.stream_stream
        metadata = relayed_metadata(context, leader.address, FORWARDED)
        call = make(path)(request, metadata=metadata, timeout=context.time_remaining())
        self._in_flight[call] = leader.address
        try:
            await audit.log_stream()
            async for response in call:
                yield response
        except asyncio.CancelledError:
            if is_ended():
                raise
            raise _replaced() from None
        except grpc.aio.AioRpcError as error:
            await _relay_status(context, error)
        finally:
            self._in_flight.pop(call, None)
            call.cancel()

    async def _pause(self, deadline: float) -> None:
        """Pause before a retry; another leader may be known afterwards."""
        if asyncio.get_running_loop().time() + PAUSE_SECONDS >= deadline:
            raise errors.unavailable("the replica that leads this service does not answer", reason=errors.NO_LEADER)
        await asyncio.sleep(PAUSE_SECONDS)

    def _to(self, leader: Leader) -> grpc.aio.Channel:
        if self._channel is None or (leader.address, certificate_generation()) != self._connected_to:
            self._drop()
            self._connected_to, self._channel = (
                (leader.address, certificate_generation()),
                forwarding_channel(leader.address),
            )
        return self._channel

    def _drop(self) -> None:
        """Release the channel to a previous leader; its calls end by themselves, or with that leader."""
        if self._channel:
            task = asyncio.get_running_loop().create_task(self._channel.close(self._patience_seconds))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._channel = None

    async def close(self) -> None:
        """Close all channels."""
        if self._channel:
            await self._channel.close()
            self._channel = None
        await cancel_and_wait(*self._closing)


def _may_retry(error: grpc.aio.AioRpcError, method: MethodRules) -> bool:
    """Return whether a failed call may be retried with the next leader."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    reason = errors.from_error(error).reason
    return reason == errors.NOT_LEADER or (method.retried and reason == grpc.StatusCode.UNAVAILABLE.name)


def _replaced() -> errors.Problem:
    return errors.unavailable("the replica that led this service was replaced", PAUSE_SECONDS, errors.NO_LEADER)


async def _relay_status(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    """End a call with the status of the forwarded call."""
    if error.code() is grpc.StatusCode.UNAVAILABLE and errors.from_error(error).reason == error.code().name:
        raise errors.unavailable("the replica that leads this service does not answer", 0.5, errors.NO_LEADER)
    await relay_error(context, error)
