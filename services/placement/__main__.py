"""Process entry point of the placement service: composes its parts from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cotenant import telemetry
from cotenant.leadership.election import Election
from cotenant.leadership.leader_handlers import LeaderHandlers
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.leadership.replica import Replica, advertised_address, serve_replica
from cotenant.rpc.endpoints import NO_ENDPOINTS, Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Host, Server
from cotenant.security.server_security import PLAIN, Security
from cotenant.services.placement.api.server import SERVICES, Placement, PlacementConfig, use_policies
from cotenant.services.placement.placement_leadership import LEADER
from cotenant.store.open import open_store
from cotenant.store.port import Store

PREFIX = "placement/"


async def serve(
    *,
    address: str,
    store_url: str,
    memory: Path | None = None,
    token: str | None = None,
    config: PlacementConfig,
    advertised: str = "",
    on_start: Callable[[int], None] = lambda port: None,
    security: Security = PLAIN,
    endpoints: Endpoints = NO_ENDPOINTS,
) -> None:
    """Serve as leader or follower until cancelled; jobs on the nodes keep running afterwards.

    `memory` is the file that records the identity of the store across restarts.

    Calls for other services are routed to `endpoints`.

    `on_start` is called with the port; `advertised` is the host at which other replicas reach this one.
    """
    telemetry.setup("placement")
    server = Server(address, token, security=security)
    server.route(endpoints)
    store = await open_store(store_url, memory)
    try:
        Placement(LeaderHandlers(), store, config)  # fails on a bad configuration before the election
        use_policies(serve_policies(server), config)

        async def lead(host: Host, store: Store, held: HeldTerm) -> Placement:
            placement = Placement(host, store, config, held)
            try:
                await placement.start()
            except BaseException:
                await placement.close()
                raise
            return placement

        election = Election(store, LEADER, advertised_address(server.bind(), address, advertised))
        replica = Replica(server, store, election, SERVICES, PREFIX, lead)
        await serve_replica(server, replica, on_start)
    finally:
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("start this service with: cotenant serve placement")
