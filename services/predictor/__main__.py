"""The predictor as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant import telemetry
from cotenant.rpc.policies import serve_policies
from cotenant.rpc.security import PLAIN, Security
from cotenant.rpc.server import Server
from cotenant.services.predictor.server import Config, start
from cotenant.store.open import open_store

log = structlog.get_logger()

DEFAULTS = Config()


async def serve(
    *,
    address: str,
    store_url: str,
    token: str | None = None,
    config: Config = DEFAULTS,
    on_start: Callable[[int], None] = lambda port: None,
    security: Security = PLAIN,
) -> None:
    """Serve until cancelled; then keep what was learnt last. `on_start` is told the port."""
    telemetry.setup("predictor")
    server = Server(address, token, security=security)
    store = await open_store(store_url)
    try:
        predicting = await start(server, store, serve_policies(server), config)
        try:
            port = await server.start()
            log.info("serving", port=port, predictors=list(config.predictors))
            on_start(port)
            await asyncio.Event().wait()  # until cancelled
        finally:
            await server.stop()
            await predicting.close()
    finally:
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("this is started with: cotenant serve predictor")
