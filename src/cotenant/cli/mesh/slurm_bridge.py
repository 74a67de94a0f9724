"""The process of the bridge to Slurm: a server, a predictor that learns from Slurm's jobs, and the bridge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from cotenant import telemetry
from cotenant.core.policy.options import options_by_policy
from cotenant.leadership.process_service import serve_process_service
from cotenant.rpc.channel import connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.security.server_security import Security
from cotenant.services.predictor.api import server as predictor
from cotenant.services.predictor.profiling.profile_planner import ProfileRules
from cotenant.services.slurm.acting import HISTORY_FILE, NODES_FILE, ActConfig
from cotenant.services.slurm.bridge import Bridge, BridgeConfig
from cotenant.services.slurm.cluster_watch import INTERVAL_SECONDS
from cotenant.services.slurm.commands import SlurmCommands, SlurmRest
from cotenant.services.slurm.output_progress import ProgressPatterns
from cotenant.store.open import open_store
from cotenant.store.witness_file import path_of

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """What the bridge is started with. `restd` is slurmrestd's socket; without it, Slurm's commands are run."""

    state_dir: Path
    listen: str
    token: str
    store_url: str
    predictors: Sequence[str] = ("history",)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by group
    allocator: str = "proportional"
    restd: Path | None = None
    interval_seconds: float = INTERVAL_SECONDS
    acts: ActConfig = field(default_factory=ActConfig)
    progress: ProgressPatterns | None = None


async def serve_bridge(settings: BridgeSettings, security: Security, on_start: Callable[[int], None]) -> None:
    """Serve until cancelled; then save what was learned last. `on_start` is called with the port.

    Raises:
        UnknownPolicy, BadOption: a policy or its options are invalid.
        StoreInUse, StoreUnavailable: the state cannot be read.
        CannotListen: the address cannot be bound.
    """
    telemetry.setup("slurm")
    store = await open_store(settings.store_url, path_of(settings.state_dir, "slurm"))
    server = Server(settings.listen, settings.token, security=security)
    port = server.bind()
    host = settings.listen.rpartition(":")[0]
    channel = connect(f"{'127.0.0.1' if host in ('0.0.0.0', '[::]', '') else host}:{port}", settings.token)
    policies = serve_policies(server)
    serve_process_service(server, store=store)
    names = settings.predictors
    options = options_by_policy(names, settings.options.get("predictor", {}))
    profiles = ProfileRules(seconds=0.0)  # Slurm's jobs are not resized to measure them
    config = predictor.Config(predictors=names, options=options, profiles=profiles)
    predicting = await predictor.start(server, store, policies, config)
    slurm = SlurmRest(settings.restd) if settings.restd else SlurmCommands()
    history, lists = settings.state_dir / HISTORY_FILE, settings.state_dir / NODES_FILE
    acts = replace(settings.acts, history=history, lists=lists)
    bridge_config = BridgeConfig(
        slurm, settings.interval_seconds, allocator=settings.allocator, acts=acts, progress=settings.progress
    )
    bridge = Bridge(server, channel, policies, bridge_config)
    try:
        await server.start()
        bridge.run()
        log.info("serving", port=port, slurm=str(settings.restd or "commands"))
        on_start(port)
        await asyncio.Event().wait()  # until cancelled
    finally:
        await bridge.close()
        await server.stop()
        await predicting.close()
        await channel.close()
        await store.close()
        telemetry.shutdown()
