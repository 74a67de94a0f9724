"""Process entry point of the contention service: composes its parts from the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant import telemetry
from cotenant.leadership.process_service import serve_process_service
from cotenant.rpc.channel import connect_when_resolved
from cotenant.rpc.endpoints import NO_ENDPOINTS, Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.security.server_security import PLAIN, Security
from cotenant.services.contention.api.server import DEFAULTS, Config, start

log = structlog.get_logger()


async def serve(
    *,
    address: str,
    store_url: str = "",
    token: str | None = None,
    config: Config = DEFAULTS,
    endpoints: Endpoints = NO_ENDPOINTS,
    on_start: Callable[[int], None] = lambda port: None,
    security: Security = PLAIN,
) -> None:
    """Serve until cancelled. `on_start` is called with the port; the store is not opened.

    Calls for other services are routed to `endpoints`. The queue among them migrates jobs; without one no job is
    migrated.
    """
    telemetry.setup("contention")
    server = Server(address, token, security=security)
    server.route(endpoints)
    serve_process_service(server)
    jobs = await connect_when_resolved(endpoints.queue, token or "") if endpoints.queue else None
    contention = await start(server, serve_policies(server), config, queue=jobs)
    try:
        port = await server.start()
        log.info("serving", port=port, policy=config.policy)
        on_start(port)
        await asyncio.Event().wait()  # until cancelled
    finally:
        await contention.close()
        await server.stop()
        if jobs is not None:
            await jobs.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("start this service with: cotenant serve contention")
