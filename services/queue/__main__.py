"""The queue as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant import telemetry
from cotenant.rpc.channel import connect
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policies import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.queue.server import QueueConfig, start
from cotenant.store.open import open_store

log = structlog.get_logger()


async def serve(
    *,
    address: str,
    store_url: str,
    endpoints: Endpoints,
    token: str | None = None,
    config: QueueConfig,
    on_start: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until cancelled; jobs run on. `on_start` is told the port."""
    telemetry.setup("queue")
    server = Server(address, token)
    store = await open_store(store_url)
    placement = connect(endpoints.placement, token or "")
    predictor = connect(endpoints.predictor, token or "")
    try:
        queue = await start(server, store, serve_policies(server), config, placement, predictor)
        port = await server.start()
        queue.run()
        log.info("serving", port=port, policy=config.policy)
        on_start(port)
        try:
            await asyncio.Event().wait()  # until cancelled
        finally:
            await server.stop(grace_seconds=1.0)
            await queue.close()
    finally:
        await placement.close()
        await predictor.close()
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("this is started with: cotenant serve queue")
