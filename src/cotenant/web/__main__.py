"""The process of the dashboard. Its only argument has its settings as JSON; see `Settings`.

`cotenant up` and `cotenant serve web` start it with a socket that already listens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cotenant import file_descriptors
from cotenant.cli.mesh import login_links
from cotenant.rpc.access import Access, find, read_token
from cotenant.web.application import Site, application
from cotenant.web.http_server import serve


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the dashboard listens, and how it reaches the mesh."""

    fd: int  # of the listening socket
    state_dir: str
    endpoint: str = ""  # empty: what the state directory says
    ca: str = ""
    cert: str = ""
    key: str = ""
    https: bool = False  # with the same certificate
    names: Sequence[str] = ()
    parent: bool = False  # ends when its standard input does
    trace_url: str = ""  # of a job's trace, with {trace_id}

    def access_of(self, token: str) -> Access:
        """Return where the mesh is, with the credentials of a session."""
        directory = None if self.endpoint else Path(self.state_dir)
        return find(directory, {}, endpoint=self.endpoint, token=token, tls=(self.ca, self.cert, self.key))

    def redeem(self, token: str) -> str:
        """Return the API token that a login link stands for; "" for a wrong one."""
        directory = Path(self.state_dir)
        return read_token(directory) if login_links.redeem(directory, token) else ""


def main() -> None:
    """Serve until a signal, or the end of the process that started this one."""
    settings = Settings(**json.loads(sys.argv[1]))
    file_descriptors.raise_limit()
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    listening = socket.socket(fileno=settings.fd)
    site = Site(
        settings.access_of,
        settings.redeem,
        port=listening.getsockname()[1],
        https=settings.https,
        names=settings.names,
        token_hint=_token_hint(Path(settings.state_dir)),
        trace_url=settings.trace_url,
    )
    files = (settings.cert, settings.key) if settings.https else None
    await serve(application(site), listening, tls=files, with_parent=settings.parent)


def _token_hint(state_dir: Path) -> str:
    return str(state_dir / "token") if (state_dir / "token").exists() else ""


if __name__ == "__main__":
    main()
