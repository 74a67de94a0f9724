"""Calls of an ASGI application without a server: what a browser sends, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its headers, the names of which are in lower case."""

    status: int
    headers: Mapping[str, str]
    cookies: Mapping[str, str]  # with their attributes, by name
    body: str


@dataclass(slots=True)
class Browser:
    """Keeps cookies, and says where its requests come from."""

    app: ASGIApp
    host: str = "127.0.0.1:7000"
    jar: dict[str, str] = field(default_factory=dict)

    async def get(self, path: str, **headers: str) -> Answer:
        """Return the answer to a GET."""
        return await self._call("GET", path, b"", headers)

    async def head(self, path: str, **headers: str) -> Answer:
        """Return the answer to a HEAD: without a body."""
        return await self._call("HEAD", path, b"", headers)

    async def post(self, path: str, fields: Mapping[str, str], **headers: str) -> Answer:
        """Return the answer to a form that a page of this host has submitted, unless a header says otherwise."""
        body = urlencode(fields).encode()
        form = {"content-type": "application/x-www-form-urlencoded", "content-length": str(len(body))}
        return await self._call("POST", path, body, {**form, "origin": f"http://{self.host}", **headers})

    async def _call(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        plain, _, query = path.partition("?")
        sent = {"host": self.host, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if self.jar:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.jar.items())
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": plain, "root_path": "",
            "raw_path": plain.encode(), "query_string": query.encode(), "server": ("127.0.0.1", 7000),
            "client": ("127.0.0.1", 9), "asgi": {"version": "3.0", "spec_version": "2.4"},
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }  # fmt: skip
        await self.app(scope, receive, send)
        start, *rest = messages
        pairs = [(name.decode(), value.decode()) for name, value in start["headers"]]
        cookies = dict(value.split("=", 1) for name, value in pairs if name == "set-cookie")
        for name, value in cookies.items():
            self.jar[name] = value.partition(";")[0].strip('"')
            if not self.jar[name]:
                del self.jar[name]
        text = b"".join(message.get("body", b"") for message in rest).decode()
        return Answer(start["status"], dict(pairs), cookies, text)
