"""Placement as a process of its own: config in, everything composed, nothing decided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cotenant import telemetry
from cotenant.leadership.election import Election
from cotenant.leadership.leadership_term import Held
from cotenant.leadership.replica import Replica, reached_at, serve_replica
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
) -> None:
    """Serve until cancelled, as the leader or as one who follows; what runs on nodes runs on.

    `memory` is the file that remembers the store over restarts.

    `on_start` is told the port; `advertised` is the host at which other replicas reach this one.
    """
    telemetry.setup("placement")
    server = Server(address, token, security=security)
    store = await open_store(store_url, memory)
    try:
        Placement(store, config)  # what cannot be made is told before anybody is elected
        use_policies(serve_policies(server), config)

        async def lead(host: Host, store: Store, held: Held) -> Placement:
            placement = Placement(store, config, held)
            placement.add_to(host)
            try:
                await placement.start()
            except BaseException:
                await placement.close()
                raise
            return placement

        election = Election(store, LEADER, reached_at(server.bind(), address, advertised))
        replica = Replica(server, store, election, SERVICES, PREFIX, lead)
        await serve_replica(server, replica, on_start)
    finally:
        await store.close()
        telemetry.shutdown()


if __name__ == "__main__":
    raise SystemExit("this is started with: cotenant serve placement")
