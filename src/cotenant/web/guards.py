"""What every request and answer of the dashboard is held to: the host, the origin of actions, security headers."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
        "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'",
    )
)  # fmt: skip
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
SAFE = frozenset({"GET", "HEAD"})
BODY_BYTES_MAX = 64 * 1024


def is_known_host(header: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this server: an address, or one of its names.

    A page of another site can make its own name point here (DNS rebinding), but it cannot make a browser send an
    address.

    >>> [is_known_host(one, {"head"}) for one in ("127.0.0.1:80", "[::1]:80", "localhost", "HEAD:8080", "evil.example")]
    [True, True, True, True, False]
    """
    host, bracket, _ = header.rpartition("]")
    name = (host.removeprefix("[") if bracket else header.partition(":")[0]).lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name in names
    return True


def is_same_origin(headers: Headers, scheme: str) -> bool:
    """Return whether a page of this server has made the request.

    Without a referrer, browsers hide the origin of a submitted form as "null" and say only that it is the same.
    """
    origin = headers.get("origin", "")
    if origin and origin != "null":
        return origin == f"{scheme}://{headers.get('host', '')}"
    return headers.get("sec-fetch-site", "") == "same-origin"


class Guards:
    """Refuses foreign hosts, actions of foreign pages and large bodies, and adds the security headers to answers."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        if not is_known_host(headers.get("host", ""), self._names):
            return PlainTextResponse("this server has another name; add it with --address\n", 421)
        if scope["method"] in SAFE:
            return None
        if not is_same_origin(headers, scope["scheme"]):
            return PlainTextResponse("only pages of this server may do that\n", 403)
        length = headers.get("content-length", "")
        if not length.isascii() or not length.isdigit() or int(length) > BODY_BYTES_MAX:
            return PlainTextResponse("the request is too large\n", 413)
        return None
