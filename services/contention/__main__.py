"""Contention as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from cotenant import telemetry
from cotenant.leadership.replica_service import serve_description
from cotenant.rpc.channel import connect
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
    queue: str = "",
    on_start: Callable[[int], None] = lambda port: None,
    security: Security = PLAIN,
) -> None:
    """Serve until cancelled. `on_start` is told the port; the store that all services are told of is not opened.

    `queue` is where jobs can be moved away; where it is empty nobody is moved.
    """
    telemetry.setup("contention")
    server = Server(address, token, security=security)
    serve_description(server)
    jobs = connect(queue, token or "") if queue else None
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
    raise SystemExit("this is started with: cotenant serve contention")
