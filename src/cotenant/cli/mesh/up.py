"""`cotenant up`: the whole mesh on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant import file_descriptors
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.security_options import Guarding, check_listen, guarding_of
from cotenant.cli.mesh.settings import (
    Settings,
    archive_of,
    check_failure_rules,
    holding_of,
    merged,
    node_name,
    read_options,
    read_settings,
    retrying_of,
    rules_of,
    split_cpus,
    store_limits_of,
)
from cotenant.cli.mesh.shared_identity import guarded, secret_paths
from cotenant.cli.outcome import CommandError, ExitCode, note, usage

if TYPE_CHECKING:  # grpc and the services load only when the mesh is started
    from cotenant.cli.mesh.agent_processes import AgentProcesses
    from cotenant.cli.mesh.embedded import EmbeddedMesh, MeshConfig

RETRY_SECONDS = 1.0
BACKFILL = {"queue": {"mode": "backfill"}}  # a gang that finds no room holds nobody back, unless that is wanted


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(up)


def up(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in TOML; flags win over them.")] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="sqlite, sqlite:PATH or etcd://HOST:PORT,…")] = None,
    gpus: Annotated[str | None, typer.Option(metavar="auto|fake:N", help="Found by NVML, or declared.")] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Divide this machine into so many nodes.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to serve; a free port.")] = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="Queue policy.")] = None,
    placement: Annotated[str | None, typer.Option(metavar="NAME", help="Placement policy.")] = None,
    allocator: Annotated[str | None, typer.Option(metavar="NAME", help="CPU allocator.")] = None,
    predictor: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]", help="Predictors, asked in this order.")
    ] = None,
    contention: Annotated[str | None, typer.Option(metavar="NAME", help="Contention policy.")] = None,
    preemption: Annotated[
        str | None, typer.Option(metavar="RULE", help="Who is stopped for others: policy, priority or never.")
    ] = None,
    run_seconds_min: Annotated[
        float | None, typer.Option(metavar="S", help="Nobody who has run for less is stopped for others.")
    ] = None,
    reserve_after_seconds: Annotated[
        float | None, typer.Option(metavar="S", help="A gang that waits for so long gets a reservation; inf: never.")
    ] = None,
    reservations: Annotated[int | None, typer.Option(metavar="N", help="So many reservations at a time.")] = None,
    reclaim: Annotated[
        bool | None, typer.Option("--reclaim/--no-reclaim", help="Whether tenants take lent room back.")
    ] = None,
    fair_share: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Who shares the cluster fairly, by weight: tenants, or off for nobody."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without TLS.")] = False,
    shared_identity: Annotated[
        bool | None,
        typer.Option("--shared-identity", help="Not as root: let other people submit, though their jobs run as you."),
    ] = None,
    share_machine: Annotated[
        bool | None,
        typer.Option(
            "--share-machine",
            envvar="COTENANT_SHARE_MACHINE",
            help="Offer CPUs and GPUs that another agent on this machine offers too.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="GROUP.KEY=VALUE", help="An option of a policy; repeatable.")
    ] = None,
) -> None:
    """Run the whole mesh on this machine, in the foreground.

    The agent of each node is a process of its own, which is started again if it ends. Jobs run in processes of their
    own, too: Ctrl-C ends the mesh and no job; the next `up` with the same state directory
    finds them again. The mesh listens on loopback and asks for the token that it keeps in its state directory. On an
    etcd on which another mesh or service leads it does not start; `cotenant serve` runs several on one. Where etcd is
    away for a while the mesh goes on with what it knows, and writes again once that is back.

    \b
    Examples:
      cotenant up
      cotenant up --gpus fake:4
      cotenant up --state-dir ./state --queue las --option queue.thresholds=600,3600
      cotenant up --store etcd://10.0.0.1:2379,10.0.0.2:2379 --listen 127.0.0.1:7070
    """
    flags = {
        "store": store,
        "gpus": gpus,
        "nodes": nodes,
        "listen": listen,
        "queue": queue,
        "placement": placement,
        "allocator": allocator,
        "predictor": predictor,
        "contention": contention,
        "preemption": preemption,
        "run_seconds_min": run_seconds_min,
        "reclaim": reclaim,
        "fair_share": fair_share,
        "reserve_after_seconds": reserve_after_seconds,
        "reservations": reservations,
        "shared_identity": shared_identity,
        "share_machine": share_machine,
    }
    settings = read_settings(config)
    settings = Settings(
        **{name: getattr(settings, name) for name in Settings.__dataclass_fields__}
        | {name: value for name, value in flags.items() if value is not None}
    )
    guarding = guarding_of(settings.sections, Flags.of(context), insecure=insecure)
    check_listen(settings.listen, guarding)
    guarding = guarded(guarding, settings, state_dir_of(context))
    file_descriptors.raise_limit()
    agents = start_agents(settings)
    mesh = mesh_config(settings, state_dir_of(context), read_options(option or ()), guarding)
    asyncio.run(run(mesh, agents))


def state_dir_of(context: typer.Context) -> Path:
    """The state directory: from the flag, else COTENANT_STATE_DIR, else the default one."""
    from cotenant.rpc.access import default_state_dir  # imports no grpc, but a little that --help need not wait for

    given = context.find_root().params.get("state_dir") or os.environ.get("COTENANT_STATE_DIR")
    return Path(given).absolute() if given else default_state_dir(os.environ)


def start_agents(settings: Settings) -> AgentProcesses:
    """Start the processes of this machine's agents. They import what they need while the services are imported here."""
    from cotenant.cli.mesh.agent_processes import AgentProcesses

    return AgentProcesses(node_ids_of(settings))


def node_ids_of(settings: Settings) -> list[str]:
    """Return the ids of this machine's nodes.

    Raises:
        CommandError: there are fewer CPUs than nodes.
    """
    name, parts = node_name(), len(split_cpus(settings.nodes))
    return [name] if parts == 1 else [f"{name}-{number}" for number in range(1, parts + 1)]


def mesh_config(
    settings: Settings, state_dir: Path, options: dict[str, dict[str, str]], guarding: Guarding | None = None
) -> MeshConfig:
    """Make of settings what the mesh is made of.

    Raises:
        CommandError: a setting cannot be taken.
    """
    from cotenant.cli.mesh.embedded import MeshConfig
    from cotenant.node_agent.control.agent_config import AgentConfig

    defaults = BACKFILL if settings.queue == "fifo" else {}
    parts = split_cpus(settings.nodes)
    agents = [
        AgentConfig(
            node_id=node_id,
            placement_endpoint="",  # filled in once the mesh has its port
            state_dir=state_dir / "nodes" / node_id,
            gpus=settings.gpus if number == 1 or settings.gpus != "auto" else "fake:0",  # a GPU is one node's
            cpus=cpus,
            machine_parts=len(parts),
            rack=settings.rack,
            address="127.0.0.1",
            shareable_gpus=settings.shareable_gpus,
            split_siblings=settings.split_siblings,
            sample_interval_seconds=settings.sample_seconds,
            memory_bandwidth_peak=settings.memory_bandwidth_peak,
            pids_max=settings.pids_max,
            work_bytes_max=settings.work_bytes_max,
            disk_reserve_bytes=settings.disk_reserve_bytes,
            users=guarding.users if guarding else {},
            shared_identity=settings.shared_identity,
            hidden=secret_paths(settings, guarding, state_dir),
            share_machine=settings.share_machine,
        )
        for number, (node_id, cpus) in enumerate(zip(node_ids_of(settings), parts, strict=True), 1)
    ]
    return MeshConfig(
        state_dir=state_dir,
        listen=settings.listen,
        store_url="" if settings.store == "sqlite" else settings.store,
        store_limits=store_limits_of(settings),
        agents=agents,
        queue=settings.queue,
        placement=settings.placement,
        allocator=settings.allocator,
        predictors=settings.predictors,
        contention=settings.contention,
        options=merged(defaults, settings.options, options),
        heartbeat_seconds=settings.heartbeat_seconds,
        lost_after_seconds=settings.lost_after_seconds,
        rules=rules_of(settings),
        window_seconds=settings.window_seconds,
        failure_rules=check_failure_rules(settings),
        retrying=retrying_of(settings),
        holding=holding_of(settings),
        checkpoint_seconds=settings.checkpoint_seconds,
        profile_seconds=settings.profile_seconds,
        guarding=guarding,
        ended_jobs=settings.ended_jobs,
        ended_days=settings.ended_days,
        history_seconds=settings.history_seconds,
        archive=archive_of(settings, state_dir),
    )


async def run(config: MeshConfig, agents: AgentProcesses | None = None) -> None:
    """Run the mesh until a signal ends it, which may come while it is still starting."""
    from cotenant import telemetry

    telemetry.setup("cotenant")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving, stopping = asyncio.create_task(_serve(config, agents)), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            note("ending the mesh; jobs run on, and the next `cotenant up` with this state directory finds them again")
            serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        stopping.cancel()
        telemetry.shutdown()


async def _serve(config: MeshConfig, agents: AgentProcesses | None = None) -> None:
    """Run the mesh until cancelled. One that lost its lead, as where its store was away, begins anew at its address."""
    from cotenant.rpc import gc_tuning

    async with opened(config, agents) as mesh:
        gc_tuning.settle()
        await tell_ready(mesh)
        address, why = mesh.address, await mesh.lost()
    while True:
        note(f"this mesh leads no more on its store, and begins anew: {why}")
        async with opened(replace(config, listen=address), patient=True) as mesh:
            note(f"the mesh is up again at {mesh.address}")
            why = await mesh.lost()


async def _start(mesh: EmbeddedMesh, *, patient: bool) -> None:
    """Start a mesh; a patient one waits for its store, and for its port where somebody still holds that."""
    from cotenant.rpc.server import CannotListen
    from cotenant.store.port import StoreUnavailable

    while True:
        try:
            await mesh.start()
            return
        except (StoreUnavailable, CannotListen) as error:
            if not patient:
                raise
            note(f"it cannot begin yet: {error}")
        await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def opened(
    config: MeshConfig, agents: AgentProcesses | None = None, *, patient: bool = False
) -> AsyncIterator[EmbeddedMesh]:
    """Run the mesh inside; what keeps it from starting is told in a user's words."""
    from cotenant import plugins
    from cotenant.cli.mesh.agent_processes import AgentFailed
    from cotenant.cli.mesh.embedded import EmbeddedMesh
    from cotenant.leadership.leadership_set import AnotherLeads
    from cotenant.rpc.access import NoAccess
    from cotenant.rpc.server import CannotListen
    from cotenant.store.port import StoreDistrusted, StoreInUse, StoreUnavailable
    from cotenant.store.schema import BadRecord, NewerSchema

    mesh = EmbeddedMesh(config, agents)
    try:
        try:
            await _start(mesh, patient=patient)
            await mesh.nodes_ready()
        except (plugins.UnknownPolicy, plugins.BadOption, ValueError) as error:
            raise usage(str(error), hint="`cotenant policies` and `cotenant up --help` show what there is") from None
        except StoreInUse as error:
            hint = "another `cotenant up` runs here; stop it, or pass --state-dir"
            raise CommandError(str(error), hint=hint) from None
        except AnotherLeads as error:
            hint = "one mesh uses a store; `cotenant serve` runs several processes of each service on one etcd"
            raise CommandError(str(error), hint=hint) from None
        except StoreDistrusted as error:
            raise CommandError(f"{error.reason}: {error}", hint=error.remedy) from None
        except StoreUnavailable as error:
            raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
        except AgentFailed as error:
            raise CommandError(str(error), code=ExitCode.USAGE if error.bad_settings else ExitCode.FAILED) from None
        except (NewerSchema, BadRecord, CannotListen, NoAccess, OSError) as error:
            raise CommandError(str(error)) from None
        yield mesh
    finally:
        await mesh.close()


def _shares_disk(config: MeshConfig) -> str:
    """Return a warning where jobs can fill the file system that the store is on; "" where they cannot."""
    nodes = [agent.state_dir for agent in config.agents]
    try:
        together = not config.store_url and any(one.stat().st_dev == config.state_dir.stat().st_dev for one in nodes)
    except OSError:
        return ""
    reserve = config.store_limits.reserve_bytes // 2**20
    return (
        f"jobs' directories share a file system with the store; below {reserve} MiB of free space the largest jobs are "
        f"ended. To keep them apart, mount another file system at {config.state_dir / 'nodes'}"
        if together
        else ""
    )


async def tell_ready(mesh: EmbeddedMesh) -> None:
    """Say where the mesh is, once its nodes are there."""
    from cotenant.rpc.access import default_state_dir

    nodes = await mesh.nodes_ready()
    for node in nodes:
        kind = "declared GPUs" if any(gpu.declared for gpu in node.inventory.gpus) else "GPUs"
        note(f"node {node.id}: {len(node.inventory.gpus)} {kind}, {len(node.inventory.cores)} cores")
        for sentence in node.inventory.not_enforced:
            note(f"  not enforced here: {sentence}")
    if shared := _shares_disk(mesh.config):
        note(shared)
    note(f"the mesh is up at {mesh.address}; its state is in {mesh.config.state_dir}")
    default = "" if mesh.config.state_dir == default_state_dir(os.environ) else f" --state-dir {mesh.config.state_dir}"
    note(f"try: cotenant submit{default} --gpus 1 --wait -- nvidia-smi -L")
