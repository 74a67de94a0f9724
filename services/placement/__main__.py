"""Placement as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant import telemetry
from cotenant.rpc.policies import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.placement.server import PlacementConfig, start
from cotenant.store.open import open_store

log = structlog.get_logger()


async def serve(
    *,
    address: str,
    store_url: str,
    token: str | None = None,
    config: PlacementConfig,
    on_start: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until cancelled; what runs on nodes runs on. `on_start` is told the port."""
    telemetry.setup("placement")
    server = Server(address, token)
    store = await open_store(store_url)
    try:
        placement = await start(server, store, serve_policies(server), config)
        port = await server.start()
        log.info("serving", port=port, policy=config.placement, allocator=config.allocator)
        on_start(port)
        try:
            await asyncio.Event().wait()  # until cancelled
        finally:
            await placement.close()
            await server.stop(grace_seconds=1.0)
    finally:
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("this is started with: cotenant serve placement")
