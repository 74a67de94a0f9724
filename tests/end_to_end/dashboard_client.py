"""A browser without scripts, for the dashboard of a mesh."""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator
from http.cookiejar import CookieJar
from typing import Any
from urllib.parse import urlencode

from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

SECONDS_MAX = 60.0


class Http:
    """A browser without scripts: it keeps cookies and follows redirects."""

    def __init__(self, base: str, tls: ssl.SSLContext | None = None) -> None:
        self.base = base
        self.jar = CookieJar()
        handlers = (urllib.request.HTTPCookieProcessor(self.jar), urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers)

    def __call__(self, path: str, fields: dict[str, str] | None = None, **headers: str) -> tuple[int, str, str]:
        """Return the status, the final URL and the text of an answer."""
        data = None if fields is None else urlencode(fields).encode()
        sent = {"Origin": self.base, **headers} if data is not None else headers
        request = urllib.request.Request(self.base + path, data, sent)
        try:
            with self._opener.open(request, timeout=SECONDS_MAX) as answer:
                return answer.status, answer.url, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.url or "", error.read().decode()

    def log_in(self, token: str) -> Http:
        """Log in with an API token."""
        status, url, text = self("/login", {"csrf": self.csrf("/login"), "token": token})
        assert (status, url) == (200, f"{self.base}/"), text
        return self

    def csrf(self, path: str) -> str:
        """Return the token of a page's forms."""
        found = re.search(r'name="csrf" (?:content|value)="([^"]+)"', self(path)[2])
        assert found
        return found[1]

    def events(self, path: str) -> Generator[tuple[str, Any]]:
        """Yield the events of a stream."""
        with self._opener.open(self.base + path, timeout=SECONDS_MAX) as stream:
            name = ""
            for line in stream:
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)


def link_of(mesh: Mesh) -> str:
    found = until(lambda: re.findall(r"dashboard: (\S+)\n", mesh.log.read_text()), "the link")
    return str(found[0])
