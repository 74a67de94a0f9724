"""Process entry point of the predictor service: composes its parts from the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from cotenant import telemetry
from cotenant.leadership.election import Election
from cotenant.leadership.process_service import serve_process_service
from cotenant.leadership.replica import Replica, advertised_address, serve_replica
from cotenant.rpc.endpoints import NO_ENDPOINTS, Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.security.server_security import PLAIN, Security
from cotenant.services.predictor.api.server import GROUP, OBSERVATION_SERVICE, SERVICE, Config, start
from cotenant.services.predictor.predictor_replica import LEADER, PredictorReplica
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
    endpoints: Endpoints = NO_ENDPOINTS,
) -> None:
    """Serve as leader or follower until cancelled; then save what was learned last.

    `memory` is the file that records the identity of the store across restarts.

    Calls for other services are routed to `endpoints`.

    `on_start` is called with the port; `advertised` is the host at which other replicas reach this one. With
    `config.follow` the predictor never takes observations.
    """
    telemetry.setup("predictor")
    server = Server(address, token, security=security)
    server.route(endpoints)
    store = await open_store(store_url, memory)
    try:
        if config.follow:
            await _follow(server, store, config, on_start)
        else:
            predictor_replica = PredictorReplica(store, config)
            predictor_replica.check()
            serve_policies(server).use(GROUP, *config.predictors, options=config.options)
            election = Election(store, LEADER, advertised_address(server.bind(), address, advertised))
            replica = Replica(
                server,
                store,
                election,
                (SERVICE, OBSERVATION_SERVICE),
                "",
                predictor_replica.lead,
                read=predictor_replica.read,
                patient=True,
            )
            await serve_replica(server, replica, on_start)
    finally:
        await store.close()
        telemetry.shutdown()


async def _follow(server: Server, store: Store, config: Config, on_start: Callable[[int], None]) -> None:
    serve_process_service(server, store=store)
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
    raise SystemExit("start this service with: cotenant serve predictor")
