"""The predictor as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from cotenant import telemetry
from cotenant.leadership.election import Election
from cotenant.leadership.replica import Replica, reached_at, serve_replica
from cotenant.leadership.replica_service import serve_description
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.security.server_security import PLAIN, Security
from cotenant.services.predictor.api.server import GROUP, SERVICE, Config, start
from cotenant.services.predictor.predictor_replica import LEADER, Replicated
from cotenant.store.open import open_store
from cotenant.store.port import Store

log = structlog.get_logger()

DEFAULTS = Config()


async def serve(
    *,
    address: str,
    store_url: str,
    memory: Path | None = None,
    token: str | None = None,
    config: Config = DEFAULTS,
    advertised: str = "",
    on_start: Callable[[int], None] = lambda port: None,
    security: Security = PLAIN,
) -> None:
    """Serve until cancelled, as the one that observes or as one that follows; then keep what was learnt last.

    `memory` is the file that remembers the store over restarts.

    `on_start` is told the port; `advertised` is the host at which other replicas reach this one. Who is told to follow
    (`config.follow`) never observes.
    """
    telemetry.setup("predictor")
    server = Server(address, token, security=security)
    store = await open_store(store_url, memory)
    try:
        if config.follow:
            await _follow(server, store, config, on_start)
        else:
            replicated = Replicated(store, config)
            replicated.check()
            serve_policies(server).use(GROUP, *config.predictors, options=config.options)
            election = Election(store, LEADER, reached_at(server.bind(), address, advertised))
            replica = Replica(
                server, store, election, (SERVICE,), "", replicated.lead, read=replicated.read, patient=True
            )
            await serve_replica(server, replica, on_start)
    finally:
        await store.close()
        telemetry.shutdown()


async def _follow(server: Server, store: Store, config: Config, on_start: Callable[[int], None]) -> None:
    serve_description(server, store=store)
    predicting = await start(server, store, serve_policies(server), config)
    try:
        port = await server.start()
        log.info("serving", port=port, predictors=list(config.predictors))
        on_start(port)
        await asyncio.Event().wait()  # until cancelled
    finally:
        await server.stop()
        await predicting.close()


if __name__ == "__main__":
    raise SystemExit("this is started with: cotenant serve predictor")
