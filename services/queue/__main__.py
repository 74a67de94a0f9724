"""The queue as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cotenant import telemetry
from cotenant.leadership.election import Election
from cotenant.leadership.replica import Replica, reached_at, serve_replica
from cotenant.rpc.channel import connect
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.rpc.task_group import Background
from cotenant.security.server_security import PLAIN, Security
from cotenant.services.queue.api.server import QUEUES, SERVICES, QueueConfig
from cotenant.services.queue.queue_replica import LEADER, PREFIX, Replicated
from cotenant.store.compaction import Upkeep
from cotenant.store.open import open_store


async def serve(
    *,
    address: str,
    store_url: str,
    memory: Path | None = None,
    endpoints: Endpoints,
    token: str | None = None,
    config: QueueConfig,
    advertised: str = "",
    on_start: Callable[[int], None] = lambda port: None,
    security: Security = PLAIN,
) -> None:
    """Serve until cancelled, as the leader or as one who follows; jobs run on.

    `memory` is the file that remembers the store over restarts.

    `on_start` is told the port; `advertised` is the host at which other replicas reach this one.
    """
    telemetry.setup("queue")
    server = Server(address, token, security=security)
    store = await open_store(store_url, memory, config.store_limits)
    placement = connect(endpoints.placement, token or "")
    predictor = connect(endpoints.predictor, token or "")
    background = Background()
    try:
        replicated = Replicated(config, placement, predictor)
        replicated.check(store)
        serve_policies(server).use(QUEUES, config.policy, options=config.options)
        election = Election(store, LEADER, reached_at(server.bind(), address, advertised))
        replica = Replica(server, store, election, SERVICES, PREFIX, replicated.lead, read=replicated.read)
        background.forever("store-upkeep", Upkeep(store, kept_seconds=config.history_seconds).run)
        await serve_replica(server, replica, on_start)
    finally:
        await background.close()
        await placement.close()
        await predictor.close()
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("this is started with: cotenant serve queue")
