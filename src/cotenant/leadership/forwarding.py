"""Passing calls on to the leader as they came: bytes, metadata, deadline; and its answer or status back as it came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from cotenant.codec import errors
from cotenant.codec.methods import METHODS, Method
from cotenant.leadership.election import Election
from cotenant.leadership.leadership_term import Leader
from cotenant.rpc.channel import generation, passage
from cotenant.rpc.task_cancellation import end
from cotenant.security import audit
from cotenant.security.audit import CALL, FORWARDED
from cotenant.security.identity import ANYONE, CALLER, caller, speaking_for

PATIENCE_SECONDS = 5.0  # a call waits so long for a leader: longer than it takes to elect one
PAUSE_SECONDS = 0.05  # before a call is repeated
LEFT_SECONDS = 1.0  # to end what is under way, for a leader that was replaced: one that is halted never does
OWN = ("user-agent", "te", "content-type", FORWARDED, CALL)  # metadata that belongs to a connection


class Forwarder:
    """Passes calls on to whoever leads.

    A call is repeated where nothing was done (the leader said that it leads no more) or where a repeat does no harm,
    until a leader answers it or its time is over. Once another one leads nothing is waited for any more from the one
    before, which may be halted with all its connections open: no refusal would ever come, and no end of a stream.
    """

    def __init__(self, election: Election, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._election, self._patience_seconds = election, patience_seconds
        self._dialled = "", 0
        self._channel: grpc.aio.Channel | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._under_way: dict[Any, str] = {}  # by call: the address of whoever is to answer it

    def follow(self, leader: Leader | None) -> None:
        """Let go, soon, of what was passed on to somebody in whose place another one leads."""
        if leader is None:
            return  # it may be elected anew
        for call in [call for call, address in self._under_way.items() if address != leader.address]:
            del self._under_way[call]
            asyncio.get_running_loop().call_later(LEFT_SECONDS, call.cancel)

    def deadline_of(self, context: Any) -> float:
        """Until when a call may wait for a leader, in the loop's time."""
        left, wait_seconds = context.time_remaining(), self._patience_seconds
        if left is not None and left < wait_seconds:
            wait_seconds = left
        return asyncio.get_running_loop().time() + wait_seconds

    async def leader(self, context: Any, deadline: float) -> Leader:
        """Wait until it is known who leads.

        Raises:
            Problem: UNAVAILABLE, NO_LEADER, where nobody does in time.
            StoreRegressed, StoreReplaced: nobody does, for the store is not the one that was written.
        """
        if is_forwarded(context):
            raise errors.unavailable("whoever was asked does not lead", PAUSE_SECONDS, errors.NOT_LEADER)
        if self._election.leader is not None:
            return self._election.leader
        self._election.check_store()
        try:
            async with asyncio.timeout_at(deadline):
                while (leader := self._election.leader) is None:
                    await self._election.changed()
        except TimeoutError:
            raise errors.unavailable(
                f"no replica leads this service, or none can be seen ({self._election.key}); nothing was done",
                reason=errors.NO_LEADER,
            ) from None
        return leader

    async def answer(self, leader: Leader, path: str, request: Any, context: Any, deadline: float) -> bytes | None:
        """Pass a call on that is answered once; None where it is to be tried again."""
        streams = not isinstance(request, bytes)
        channel = self._to(leader)
        make: Any = channel.stream_unary if streams else channel.unary_unary
        call = make(path)(request, metadata=_passed(context, leader), timeout=context.time_remaining())
        self._under_way[call] = leader.address
        try:
            response: bytes = await call
        except asyncio.CancelledError:
            if _is_ended():
                raise
            if streams or not METHODS.get(path, Method()).retried:
                raise _replaced() from None
            return None
        except grpc.aio.AioRpcError as error:
            if not streams and _again(error, METHODS.get(path, Method())):
                await self._pause(deadline)
                return None
            await _pass_on(context, error)
        finally:
            self._under_way.pop(call, None)
            call.cancel()
        context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
        return response

    async def stream(self, leader: Leader, path: str, request: Any, context: Any) -> AsyncIterator[bytes]:
        """Pass a call on that is answered by a stream."""
        channel = self._to(leader)
        make: Any = channel.unary_stream if isinstance(request, bytes) else channel.stream_stream
        call = make(path)(request, metadata=_passed(context, leader), timeout=context.time_remaining())
        self._under_way[call] = leader.address
        try:
            await audit.begun()
            async for response in call:
                yield response
        except asyncio.CancelledError:
            if _is_ended():
                raise
            raise _replaced() from None
        except grpc.aio.AioRpcError as error:
            await _pass_on(context, error)
        finally:
            self._under_way.pop(call, None)
            call.cancel()

    async def _pause(self, deadline: float) -> None:
        """Wait until another leader may be known."""
        if asyncio.get_running_loop().time() + PAUSE_SECONDS >= deadline:
            raise errors.unavailable("the replica that leads this service does not answer", reason=errors.NO_LEADER)
        await asyncio.sleep(PAUSE_SECONDS)

    def _to(self, leader: Leader) -> grpc.aio.Channel:
        if self._channel is None or (leader.address, generation()) != self._dialled:
            self._drop()
            self._dialled, self._channel = (leader.address, generation()), passage(leader.address)
        return self._channel

    def _drop(self) -> None:
        """Let go of the channel to a leader of before; what is under way on it ends by itself, or with its leader."""
        if self._channel:
            task = asyncio.get_running_loop().create_task(self._channel.close(self._patience_seconds))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._channel = None

    async def close(self) -> None:
        """Let go of all channels."""
        if self._channel:
            await self._channel.close()
            self._channel = None
        await end(*self._closing)


def is_forwarded(context: Any) -> bool:
    """Whether another replica has passed a call on, to whoever it believes to lead."""
    return any(key == FORWARDED for key, _ in context.invocation_metadata() or ())


def _passed(context: Any, leader: Leader) -> tuple[tuple[str, Any], ...]:
    """Give a call's metadata to the call that takes its place.

    Whoever is known by a token is known by it to the leader too. A certificate cannot be passed on: the leader is told
    whose it was. By what the audit log knows the call here, it does there.
    """
    told = context.invocation_metadata() or ()
    kept = [(key, value) for key, value in told if key not in OWN and not key.startswith("grpc-")]
    if caller() != ANYONE and all(key != "authorization" for key, _ in kept):
        kept = [(key, value) for key, value in kept if key != CALLER]
        kept.append(speaking_for(caller()))
    return (*kept, (FORWARDED, "1"), (CALL, audit.passed_on(leader.address)))


def _again(error: grpc.aio.AioRpcError, method: Method) -> bool:
    """Tell whether a call that failed may be made again, with whoever leads next."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    reason = errors.from_error(error).reason
    return reason == errors.NOT_LEADER or (method.retried and reason == grpc.StatusCode.UNAVAILABLE.name)


def _is_ended() -> bool:
    """Whether it is the caller who does not wait any more."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _replaced() -> errors.Problem:
    return errors.unavailable("the replica that led this service was replaced", PAUSE_SECONDS, errors.NO_LEADER)


async def _pass_on(context: Any, error: grpc.aio.AioRpcError) -> NoReturn:
    """End a call as the one in its place has ended."""
    trailers = cast("Any", tuple(error.trailing_metadata() or ()))
    if error.code() is grpc.StatusCode.UNAVAILABLE and errors.from_error(error).reason == error.code().name:
        raise errors.unavailable("the replica that leads this service does not answer", 0.5, errors.NO_LEADER)
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailers)
    raise AssertionError("abort raises")
