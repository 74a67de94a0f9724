"""The queue service as its own process: wires up the parts from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cotenant import telemetry
from cotenant.leadership.election import Election
from cotenant.leadership.replica import Replica, advertised_address, serve_replica
from cotenant.rpc.channel import connect_when_resolved
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.security.server_security import PLAIN, Security
from cotenant.services.queue.api.server import QUEUES, SERVICES, QueueConfig
from cotenant.services.queue.queue_replica import LEADER, PREFIX, QueueReplica
from cotenant.store.compaction import Compactor
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
    """Serve until cancelled, as leader or follower. Jobs keep running after that.

    Args:
        endpoints: of placement and the predictor, which the queue calls, and of all services, to which it routes calls.
        memory: file in which the identity of the store is kept across restarts.
        on_start: called with the port.
        advertised: host at which other replicas reach this one.
    """
    telemetry.setup("queue")
    server = Server(address, token, security=security)
    server.route(endpoints)
    placement = await connect_when_resolved(endpoints.placement, token or "")
    predictor = await connect_when_resolved(endpoints.predictor, token or "")
    store = await open_store(store_url, memory, config.store_limits)
    background = BackgroundTasks()
    try:
        queue_replica = QueueReplica(config, placement, predictor)
        queue_replica.check(store)
        serve_policies(server).use(QUEUES, config.policy, options=config.options)
        election = Election(store, LEADER, advertised_address(server.bind(), address, advertised))
        replica = Replica(server, store, election, SERVICES, PREFIX, queue_replica.lead, read=queue_replica.read)
        background.forever("store-upkeep", Compactor(store, kept_seconds=config.history_seconds).run)
        await serve_replica(server, replica, on_start)
    finally:
        await background.close()
        await placement.close()
        await predictor.close()
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("start the queue with: cotenant serve queue")
