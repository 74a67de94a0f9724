"""Listening at the address of a part that a fault has replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio
from tests.verification.chaos.certificates import of_process

from cotenant.security.grpc_tls import WatchedTlsFiles, server_credentials

RETRY_SECONDS = 0.1

T = TypeVar("T")


async def when_free(listen: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `listen` once the address is free: another fault may keep the part's process longer."""
    while True:
        try:
            return await listen()
        except (OSError, RuntimeError):  # RuntimeError: from gRPC
            await asyncio.sleep(RETRY_SECONDS)


async def bind(server: grpc.aio.Server, address: str) -> None:
    """Make a server listen at an address once it is free, over TLS if the mesh uses it.

    Raises:
        BadTls: the part's certificate has expired.
    """
    files = of_process()
    credentials = server_credentials(WatchedTlsFiles(files)) if files else None

    async def listen() -> None:
        if credentials:
            server.add_secure_port(address, credentials)
        else:
            server.add_insecure_port(address)

    await when_free(listen)
