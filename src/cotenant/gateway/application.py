"""The gateway as an ASGI application: each request is a call of the mesh, with its caller's token.

Theory of operation. The routes come from the HTTP rules of the protos. A request is read, bounded in bytes, values and
time, and becomes a message; the answer becomes JSON. Whatever is large is converted in a thread, so that no request
delays the others by more than a few milliseconds. A call ends when its caller disconnects.

The gateway decides nothing about roles and tenants: it passes the token on. It refuses calls without a token, for on a
mesh with client certificates they would be made as the gateway itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cotenant import telemetry
from cotenant.cli.connection import Mesh, is_unreachable
from cotenant.codec import errors
from cotenant.codec.errors import Problem, Violation
from cotenant.gateway import cors
from cotenant.rpc.access import AccessError
from cotenant.rpc.endpoints import TO
from cotenant.rpc.service_homes import HOMES
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.transcoding import openapi, shipped_protos
from cotenant.transcoding.answer_json import INLINE_BYTES_MAX, answer_json
from cotenant.transcoding.http_errors import HTTP_STATUS, HttpError, problem_headers, problem_json
from cotenant.transcoding.http_routes import Route, Routes
from cotenant.transcoding.request_json import body_bytes_max, read_request

T = TypeVar("T")
log = telemetry.logger()

REQUESTS_MAX = 2_000  # at once, with open streams
LARGE_BODIES_MAX = 16  # at once; a larger body than LARGE_BYTES waits for one to be read
LARGE_BYTES = 64 * 1024
BODY_SECONDS_MAX = 30.0
FIRST_SECONDS = 1.0  # to wait for a stream's first message, or its refusal, before the status is sent
CONVERSIONS_MAX = 2  # threads; they share one interpreter lock
TOKEN = re.compile(r"bearer +([!-~]+)", re.IGNORECASE)
ADDRESS = re.compile(r"[\w.:\[\]-]{1,300}", re.ASCII)
JSON_TYPES = ("application/json", "text/json")
HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
ANY_HOME = "queue"  # of services that every process serves


class Gateway:
    """An ASGI application that calls a mesh. `connect` opens the connection, with the first call."""

    def __init__(self, connect: Callable[[], Mesh], origins: Collection[str] = ()) -> None:
        api = shipped_protos.api()
        self._routes = Routes(api)
        self._document = json.dumps(openapi.document(api), ensure_ascii=False).encode()
        self._connect = connect
        self._origins = frozenset(origins)  # of other sites' pages that may call
        self._mesh: Mesh | None = None
        self._requests = 0
        self._large = asyncio.Semaphore(LARGE_BODIES_MAX)
        self._threads = ThreadPoolExecutor(CONVERSIONS_MAX, "json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        self._requests += 1
        try:
            await self._answer_browser(scope, receive, send)
        finally:
            self._requests -= 1

    async def close(self) -> None:
        """Close the connections to the mesh."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._mesh:
            await self._mesh.close()

    async def _answer_browser(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; with named origins, as browsers need it for pages of other sites."""
        headers = Headers(scope=scope)
        if not self._origins:
            await self._answer(scope, receive, send)
            return
        if cors.is_preflight(scope["method"], headers):
            allowed = {**HEADERS, **cors.preflight_headers(self._origins, headers)}
            await send({"type": "http.response.start", "status": 204, "headers": _encoded(allowed)})
            await send({"type": "http.response.body", "body": b""})
            return
        more = _encoded(cors.answer_headers(self._origins, headers))

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._answer(scope, receive, send_with_origin)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] == openapi.PATH and scope["method"] == "GET":
                await _send(send, 200, self._document)
                return
            await self._call(scope, receive, send)
        except HttpError as error:
            await _send_problem(send, error.problem, error.status, **error.headers)
        except grpc.aio.AioRpcError as error:
            await _send_problem(send, errors.from_error(error))
        except AccessError as error:
            await _send_problem(send, errors.unavailable(f"the mesh is not found: {error}"))

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the method that a request is for.

        Raises:
            HttpError: the request is refused here.
            AioRpcError: the mesh has refused the call.
            AccessError: the mesh is not found.
        """
        if self._requests > REQUESTS_MAX:
            raise HttpError(
                errors.unavailable("this gateway has too many requests at once", reason="TOO_MANY_REQUESTS")
            )
        raw_path = scope["raw_path"].decode("ascii", "replace").partition("?")[0]
        route, variables = self._routes.find(scope["method"], raw_path)
        if route.method.client_streams:
            message = f"{route.method.name} has a stream of requests, which HTTP does not carry; call it over gRPC"
            raise HttpError(Problem(grpc.StatusCode.UNIMPLEMENTED, "NEEDS_GRPC", message))
        headers = Headers(scope=scope)
        metadata = _metadata(headers)
        body = await self._body(route, headers, receive)
        reading = (read_request, route, variables, scope["query_string"], body)
        size = len(body) + len(scope["query_string"])
        message = read_request(*reading[1:]) if size <= INLINE_BYTES_MAX else await self._in_thread(*reading)
        if route.method.server_streams:
            await _while_connected(self._stream(route, message, metadata, send), receive)
        else:
            await _while_connected(self._unary(route, message, metadata, send), receive)

    # Requests ---------------------------------------------------------------------------------------------------------

    async def _body(self, route: Route, headers: Headers, receive: Receive) -> bytes:
        """Return the body of a request.

        Raises:
            HttpError: it is too large, comes too slowly, or is not JSON by its type.
        """
        most = body_bytes_max(route) if route.body else LARGE_BYTES
        declared = headers.get("content-length", "0")
        if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(BODY_SECONDS_MAX):
                body = await self._read(receive, most)
        except TimeoutError:
            words = f"the body did not arrive within {BODY_SECONDS_MAX:g} s"
            raise HttpError(Problem(grpc.StatusCode.DEADLINE_EXCEEDED, "BODY_TOO_SLOW", words), 408) from None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind not in JSON_TYPES:
            words = f"the content-type has to be application/json, not {kind[:100]!r}"
            raise HttpError(Problem(grpc.StatusCode.INVALID_ARGUMENT, "NOT_JSON", words), 415)
        return body

    async def _read(self, receive: Receive, most: int) -> bytes:
        body, more = bytearray(), True
        while more and len(body) <= LARGE_BYTES:
            more = await _read_part(receive, body, most)
        if more:
            async with self._large:
                while more:
                    more = await _read_part(receive, body, most)
        return bytes(body)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _json(self, route: Route, data: bytes) -> bytes:
        """Return an answer as JSON.

        Raises:
            HttpError: it cannot be decoded.
        """
        try:
            if len(data) <= INLINE_BYTES_MAX:
                return answer_json(route.response, data)
            return await self._in_thread(answer_json, route.response, data)
        except DecodeError:
            raise HttpError(errors.unavailable("cannot decode the answer of the mesh")) from None

    # Calls ------------------------------------------------------------------------------------------------------------

    def _channel(self, route: Route) -> Any:
        if self._mesh is None:
            self._mesh = self._connect()
        return self._mesh.channel_to(HOMES.get(route.service, ANY_HOME))

    async def _found_again(self, error: grpc.aio.AioRpcError) -> None:
        """Look the mesh up again after an unreachable call: a restarted one may have another port."""
        if self._mesh and is_unreachable(error.code()):
            await self._mesh.find_again()

    async def _unary(self, route: Route, message: Any, metadata: Any, send: Send) -> None:
        make = self._channel(route).unary_unary
        call = make(
            route.grpc_path,
            request_serializer=route.request.SerializeToString,
        )
        try:
            answer = await call(message, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            await self._found_again(error)
            raise
        await _send(send, 200, await self._json(route, answer))

    async def _stream(self, route: Route, message: Any, metadata: Any, send: Send) -> None:
        """Send a stream's messages as lines; the status waits for the first message, or for some time."""
        make = self._channel(route).unary_stream
        call = make(
            route.grpc_path,
            request_serializer=route.request.SerializeToString,
        )(message, metadata=metadata)
        lines = self._lines(route, call)
        first = asyncio.ensure_future(anext(lines, b""))
        try:
            await asyncio.wait({first}, timeout=FIRST_SECONDS)
            if first.done():
                first.result()  # an error is the answer
            await _start(send, 200, openapi.LINES)
            await self._send_lines(first, lines, send)
        except grpc.aio.AioRpcError as error:
            await self._found_again(error)
            raise
        finally:
            first.cancel()
            call.cancel()

    async def _lines(self, route: Route, call: Any) -> AsyncIterator[bytes]:
        async for answer in call:
            yield b'{"result":' + await self._json(route, answer) + b"}\n"

    async def _send_lines(self, first: asyncio.Future[bytes], lines: AsyncIterator[bytes], send: Send) -> None:
        """Send lines until the stream ends; an error is the last line, as the status has been sent."""
        try:
            line = await first
            while line:
                await send({"type": "http.response.body", "body": line, "more_body": True})
                await asyncio.sleep(0)  # neither reading nor sending may have given way to others
                line = await anext(lines, b"")
        except (grpc.aio.AioRpcError, HttpError) as error:
            problem = error.problem if isinstance(error, HttpError) else errors.from_error(error)
            line = b'{"error":' + problem_json(problem).encode() + b"}\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _metadata(headers: Headers) -> tuple[tuple[str, str], ...]:
    """Return what of a request's headers is passed on: the token, and the process that is to answer.

    Raises:
        HttpError: there is no token, or not one that can be.
    """
    found = TOKEN.fullmatch(headers.get("authorization", "").strip())
    if not found:
        words = "the request has no API token; send the header `Authorization: Bearer TOKEN`"
        raise HttpError(errors.unauthenticated("TOKEN_MISSING", words), headers={})
    metadata = (("authorization", f"Bearer {found[1]}"),)
    if not (to := headers.get(TO, "")):
        return metadata
    if not ADDRESS.fullmatch(to):
        raise HttpError(errors.invalid([Violation(TO, "is neither a service nor an address")]))
    return (*metadata, (TO, to))


async def _read_part(receive: Receive, body: bytearray, most: int) -> bool:
    """Add the next part of a body; return whether there are more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise HttpError(Problem(grpc.StatusCode.CANCELLED, "DISCONNECTED", "the caller has disconnected"))
    body += message.get("body", b"")
    if len(body) > most:
        raise _too_large(most)
    return bool(message.get("more_body"))


def _too_large(most: int) -> HttpError:
    words = f"the body of this method may have at most {most:,} bytes"
    return HttpError(
        Problem(grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE", words), 413, {"connection": "close"}
    )


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Await the work, or cancel it when the caller disconnects."""
    working, leaving = (
        asyncio.create_task(work, name="call"),
        asyncio.create_task(_disconnected(receive), name="caller"),
    )
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        await cancel_and_wait(working, leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message: Message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _start(send: Send, status: int, kind: str, **headers: str) -> None:
    named = {"content-type": kind, **HEADERS, **headers}
    await send({"type": "http.response.start", "status": status, "headers": _encoded(named)})


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


async def _send(send: Send, status: int, body: bytes, **headers: str) -> None:
    await _start(send, status, openapi.JSON, **{"content-length": str(len(body)), **headers})
    await send({"type": "http.response.body", "body": body})


async def _send_problem(send: Send, problem: Problem, status: int = 0, **headers: str) -> None:
    """Send an error as google.rpc.Status."""
    code = status or HTTP_STATUS.get(problem.code.name, 500)
    await _send(send, code, problem_json(problem).encode(), **problem_headers(problem), **headers)
