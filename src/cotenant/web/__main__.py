"""The process of the dashboard. Its only argument has its settings as JSON; see `Settings`.

`cotenant up` and `cotenant serve web` start it with a socket that already listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from cotenant import file_descriptors
from cotenant.cli.mesh import login_links
from cotenant.rpc.access import Access, find, read_token
from cotenant.web.application import Site, application

CERTIFICATE_SECONDS = 10.0  # between two looks at its files
END_SECONDS_MAX = 1


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
    )
    config = uvicorn.Config(
        application(site),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=END_SECONDS_MAX,
    )
    config.load()
    server = uvicorn.Server(config)
    work = []
    if settings.https:
        config.ssl = _tls(settings)
        work.append(asyncio.create_task(_renew(config.ssl, settings)))
    if settings.parent:
        work.append(asyncio.create_task(_end_with_parent(server)))
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in work:
            task.cancel()


def _token_hint(state_dir: Path) -> str:
    return str(state_dir / "token") if (state_dir / "token").exists() else ""


def _tls(settings: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(settings.cert, settings.key)
    return context


async def _renew(context: ssl.SSLContext, settings: Settings) -> None:
    """Read a certificate that was replaced; one that cannot be read is tried again."""
    read = 0.0
    while True:
        changed = _written(settings.cert, settings.key)
        if read and changed != read:
            try:
                context.load_cert_chain(settings.cert, settings.key)
            except (OSError, ssl.SSLError):
                changed = read  # half written
        read = changed
        await asyncio.sleep(CERTIFICATE_SECONDS)


def _written(*paths: str) -> float:
    """Return when the newest of some files was written."""
    return max((Path(path).stat().st_mtime for path in paths if Path(path).exists()), default=0.0)


async def _end_with_parent(server: uvicorn.Server) -> None:
    ended = asyncio.Event()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read)
    await ended.wait()
    server.should_exit = True


if __name__ == "__main__":
    main()
