"""Sends a notification to a URL: one POST request, to an address that was checked.

The name is resolved once and the connection goes to the address that was found and checked, so that a name cannot be
checked with one address and called with another. Redirects are not followed. One time limit holds for everything, so
a receiver that answers byte by byte gains nothing.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import SplitResult

from cotenant.core.model.notification import HTTP, PORTS, Address, is_allowed, is_listed, url_of
from cotenant.services.queue.notifications.rules import NotificationRules

LINE_BYTES_MAX = 8192
INTERIM_MAX = 4
HEADERS_MAX = 100
PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)


class Undelivered(Exception):
    """A notification was not delivered; `passing`: a later try may succeed. The text has no secret."""

    def __init__(self, reason: str, *, passing: bool = True) -> None:
        super().__init__(reason)
        self.passing = passing


class Webhooks:
    """Posts messages to URLs."""

    def __init__(self, rules: NotificationRules, threads: Executor) -> None:
        self._rules, self._threads = rules, threads

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        if self._rules.ca_file:
            context.load_verify_locations(self._rules.ca_file)
        return context

    async def post(self, target: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Post a message.

        Raises:
            Undelivered: it was not accepted.
        """
        url = url_of(target)
        try:
            async with asyncio.timeout(self._rules.timeout_seconds):
                status = await self._status(url, body, headers)
        except TimeoutError:
            raise Undelivered(f"no answer within {self._rules.timeout_seconds:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise Undelivered(f"its certificate is not valid: {error.verify_message}") from None
        except ssl.SSLError:
            raise Undelivered("TLS failed") from None
        except (OSError, EOFError, ValueError) as error:
            raise Undelivered(_in_words(error)) from None
        if 300 <= status < 400:
            raise Undelivered(f"it answered {status}; redirects are not followed", passing=False)
        if not 200 <= status < 300:
            raise Undelivered(f"it answered {status}", passing=status >= 500 or status in PASSING)

    async def _status(self, url: SplitResult, body: bytes, headers: Mapping[str, str]) -> int:
        host, port = url.hostname or "", url.port or PORTS[url.scheme]
        address = await self._resolve(host, port, plain=url.scheme == HTTP)
        tls = None if url.scheme == HTTP else self._tls
        reader, writer = await asyncio.open_connection(
            str(address), port, limit=LINE_BYTES_MAX, ssl=tls, server_hostname=host if tls else None
        )
        try:
            writer.write(_request(url, body, headers))
            await writer.drain()
            return await _read_status(reader)
        finally:
            writer.transport.abort()
            with suppress(Exception):  # of a connection that is of no interest now
                await writer.wait_closed()

    async def _resolve(self, host: str, port: int, *, plain: bool) -> Address:
        """Return the address to connect to.

        Raises:
            Undelivered: the name is unknown, or has no address that may be reached.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (socket.gaierror, UnicodeError):
            raise Undelivered("its name cannot be resolved") from None
        addresses = [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        allowed = [one for one in addresses if is_allowed(one, self._rules.allowed)]
        if not allowed:
            raise Undelivered("it has an internal address, which allow_networks does not list", passing=False)
        if not plain:
            return allowed[0]
        listed = [one for one in allowed if is_listed(one, self._rules.allowed)]
        if not listed:
            raise Undelivered("plain http is only for the networks that allow_networks lists", passing=False)
        return listed[0]


def _request(url: SplitResult, body: bytes, headers: Mapping[str, str]) -> bytes:
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    fields = {
        "Host": url.netloc,
        "User-Agent": "cotenant",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body


async def _read_status(reader: asyncio.StreamReader) -> int:
    """Return the status of the answer; interim answers are skipped.

    Raises:
        ValueError: it is not an answer of HTTP.
        EOFError: the connection was closed before.
    """
    for _ in range(INTERIM_MAX):
        words = (await _line(reader)).split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not (words[1].isdigit() and len(words[1]) == 3):
            raise ValueError("not HTTP")
        if (status := int(words[1])) >= 200:
            return status
        for _ in range(HEADERS_MAX):
            if not (await _line(reader)).strip():
                break
    raise ValueError("too many interim answers")


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "it refused the connection"
    if isinstance(error, ConnectionError | EOFError):
        return "it closed the connection"
    return "its answer is not HTTP" if isinstance(error, ValueError) else "it cannot be reached"
