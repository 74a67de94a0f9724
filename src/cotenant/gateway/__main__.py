"""The process of the gateway. Its only argument has its settings as JSON; see `Settings`.

`cotenant up --gateway` and `cotenant serve gateway` start it with a socket that already listens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from cotenant import file_descriptors
from cotenant.cli.connection import Mesh
from cotenant.gateway.application import Gateway
from cotenant.rpc.access import Access, find
from cotenant.web.http_server import serve


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the gateway listens, and how it reaches the mesh."""

    fd: int  # of the listening socket
    state_dir: str
    endpoint: str = ""  # empty: what the state directory says
    ca: str = ""
    cert: str = ""
    key: str = ""
    https: bool = False  # with the same certificate
    origins: tuple[str, ...] = ()  # of other sites' pages that may call
    parent: bool = False  # ends when its standard input does

    def access(self) -> Access:
        """Return where the mesh is. The gateway has no token of its own: each call has its caller's."""
        directory = None if self.endpoint else Path(self.state_dir)
        found = find(directory, {}, endpoint=self.endpoint, tls=(self.ca, self.cert, self.key))
        return found._replace(token="")


def main() -> None:
    """Serve until a signal, or the end of the process that started this one."""
    settings = Settings(**json.loads(sys.argv[1]))
    file_descriptors.raise_limit()
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    listening = socket.socket(fileno=settings.fd)
    gateway = Gateway(lambda: Mesh(settings.access, report=lambda words: None), settings.origins)
    files = (settings.cert, settings.key) if settings.https else None
    try:
        await serve(gateway, listening, tls=files, with_parent=settings.parent)
    finally:
        await gateway.close()


if __name__ == "__main__":
    main()
