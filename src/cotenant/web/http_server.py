"""Serves an ASGI application on a socket that already listens; certificates are read again when they change."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

CERTIFICATE_SECONDS = 10.0  # between two looks at its files
END_SECONDS_MAX = 1


async def serve(
    app: ASGIApp, listening: socket.socket, *, tls: tuple[str, str] | None = None, with_parent: bool = False
) -> None:
    """Serve until a signal, or `with_parent` until standard input ends. `tls` are the files of certificate and key."""
    config = uvicorn.Config(
        app,
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
    if tls:
        config.ssl = _tls(*tls)
        work.append(asyncio.create_task(_renew(config.ssl, *tls)))
    if with_parent:
        work.append(asyncio.create_task(_end_with_parent(server)))
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in work:
            task.cancel()


def _tls(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    return context


async def _renew(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Read a certificate that was replaced; one that cannot be read is tried again."""
    read = 0.0
    while True:
        changed = _written(cert, key)
        if read and changed != read:
            try:
                context.load_cert_chain(cert, key)
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
