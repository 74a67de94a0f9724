"""`cotenant up`: the whole mesh on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant import file_descriptors
from cotenant.cli.annotations import typer
from cotenant.cli.flags import Flags
from cotenant.cli.mesh import metrics_endpoints, welcome
from cotenant.cli.mesh.notification_options import notification_rules
from cotenant.cli.mesh.security_options import (
    ALLOW_ORIGIN_HELP,
    SecuritySettings,
    check_listen,
    read_allowed_origins,
    read_security_settings,
)
from cotenant.cli.mesh.settings import (
    TRACE_URL_HELP,
    Settings,
    agent_settings,
    archive_path,
    check_failure_rules,
    check_trace_url,
    folder_rules,
    hold_rules,
    merged,
    node_name,
    read_options,
    read_settings,
    read_store_limits,
    retry_rules,
    sharing_rules,
    split_cpus,
    with_profile,
)
from cotenant.cli.mesh.shared_identity import restrict_submitters, secret_paths
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.missing_extras import check_extras
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.profile_names import complete_profiles
from cotenant.core.policy.profiles import DEFAULT

if TYPE_CHECKING:  # grpc and the services are imported only when the mesh starts
    from cotenant.cli.mesh.agent_processes import AgentProcesses
    from cotenant.cli.mesh.embedded import EmbeddedMesh, MeshConfig
    from cotenant.cli.mesh.http_process import HttpProcess
    from cotenant.cli.mesh.web_process import Dashboard

RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What `up` serves over HTTP: the dashboard at a loopback port, and the gateway at an address."""

    web_port: int | None = None  # None: no dashboard
    gateway: str = ""  # "": no gateway
    origins: tuple[str, ...] = ()  # of pages that may call it
    trace_url: str = ""  # of a job's trace, with {trace_id}; "": the dashboard has no such links


NO_HTTP = HttpSettings()


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(up)


def up(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in TOML; flags override them.")] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="sqlite, sqlite:PATH or etcd://HOST:PORT,…")] = None,
    gpus: Annotated[str | None, typer.Option(metavar="auto|fake:N", help="GPUs: found by NVML, or declared.")] = None,
    nodes: Annotated[int | None, typer.Option(metavar="N", help="Divide this machine into N nodes.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address to listen on; default: a free loopback port.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(metavar=metrics_endpoints.METAVAR, help=metrics_endpoints.HELP)] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Policies that work together; `cotenant policies --profile` lists them.",
            show_default=DEFAULT,
            autocompletion=complete_profiles,
        ),
    ] = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="Queue policy, instead of the profile's.")] = None,
    placement: Annotated[str | None, typer.Option(metavar="NAME", help="Placement policy.")] = None,
    allocator: Annotated[str | None, typer.Option(metavar="NAME", help="CPU allocator.")] = None,
    predictor: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME]", help="Predictors, asked in this order.")
    ] = None,
    contention: Annotated[str | None, typer.Option(metavar="NAME", help="Contention policy.")] = None,
    preemption: Annotated[
        str | None, typer.Option(metavar="RULE", help="Which jobs may be preempted: policy, priority or never.")
    ] = None,
    run_seconds_min: Annotated[
        float | None, typer.Option(metavar="S", help="Do not preempt jobs that have run for less.")
    ] = None,
    reserve_after_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Reserve resources for gangs that have waited this long; inf: never."),
    ] = None,
    reservations: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of reservations at a time.")
    ] = None,
    reclaim: Annotated[
        bool | None, typer.Option("--reclaim/--no-reclaim", help="Whether tenants reclaim lent quota.")
    ] = None,
    fair_share: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="Fair sharing by weight: tenants, throughput (GPUs count by speed), or off."),
    ] = None,
    usage_half_life_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Half-life of past use in fair sharing; 0: it does not count."),
    ] = None,
    web: Annotated[bool | None, typer.Option("--web/--no-web", help="Whether to serve the dashboard.")] = None,
    web_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", max=65535, help="Loopback port of the dashboard; default: a free one."),
    ] = None,
    trace_url: Annotated[str | None, typer.Option(metavar="URL", help=TRACE_URL_HELP)] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve the API as JSON over HTTP there; default: not at all."),
    ] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(metavar="URL", help=ALLOW_ORIGIN_HELP)] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without TLS.")] = False,
    shared_identity: Annotated[
        bool | None,
        typer.Option("--shared-identity", help="Without root: let other users submit, though their jobs run as you."),
    ] = None,
    share_machine: Annotated[
        bool | None,
        typer.Option(
            "--share-machine",
            envvar="COTENANT_SHARE_MACHINE",
            help="Offer CPUs and GPUs that another agent on this machine offers as well.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="GROUP.KEY=VALUE", help="Policy option; repeatable.")
    ] = None,
    log_format: Annotated[
        welcome.LogFormat | None,
        typer.Option(help="Log all events, as JSON or text; default: JSON, but on a terminal only warnings, as text."),
    ] = None,
) -> None:
    """Run the whole mesh on this machine, in the foreground.

    Each node's agent is a separate process, which is restarted if it exits. Ctrl-C stops the mesh; jobs keep running.
    The next `cotenant up` with the same state directory re-attaches to them.

    The mesh listens on loopback and requires the token in its state directory. It does not start on an etcd where
    another mesh or service leads; `cotenant serve` runs several processes on one etcd. While etcd is unreachable, the
    mesh keeps working from memory, and resumes writing afterwards.

    With --metrics PORT the services' metrics are at that port, and those of the agents at the ports after it.

    The dashboard is served to this machine only. Its link logs in once; afterwards the browser has a session.

    \b
    Examples:
      cotenant up
      cotenant up --web-port 7080
      cotenant up --gateway 127.0.0.1:7075
      cotenant up --gpus fake:4
      cotenant up --profile plain
      cotenant up --metrics 9464
      cotenant up --state-dir ./state --queue las --option queue.thresholds=600,3600
      cotenant up --store etcd://10.0.0.1:2379,10.0.0.2:2379 --listen 127.0.0.1:7070
    """
    check_extras("cotenant up", "agent", "server")
    at_terminal = welcome.set_up_logs(log_format)
    flags = {
        "store": store,
        "gpus": gpus,
        "nodes": nodes,
        "listen": listen,
        "metrics": metrics,
        "web": web,
        "web_port": web_port,
        "trace_url": trace_url,
        "gateway": gateway,
        "profile": profile,
        "queue": queue,
        "placement": placement,
        "allocator": allocator,
        "predictor": predictor,
        "contention": contention,
        "preemption": preemption,
        "run_seconds_min": run_seconds_min,
        "reclaim": reclaim,
        "fair_share": fair_share,
        "usage_half_life_seconds": usage_half_life_seconds,
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
    security_settings = read_security_settings(settings.sections, Flags.of(context), insecure=insecure)
    check_listen(settings.listen, security_settings)
    origins = read_allowed_origins(allow_origin or ())
    if settings.gateway:
        check_listen(settings.gateway, security_settings)
    elif allow_origin:
        raise usage_error("--allow-origin needs --gateway")
    security_settings = restrict_submitters(security_settings, settings, resolve_state_dir(context))
    addresses = metrics_endpoints.metrics_addresses(settings.metrics, 1 + settings.nodes)
    file_descriptors.raise_limit()
    if addresses:
        metrics_endpoints.expose_metrics(*addresses[0])
    agents = start_agents(settings, addresses[1:])
    mesh = mesh_config(settings, resolve_state_dir(context), read_options(option or ()), security_settings)
    check_trace_url(settings.trace_url)
    web_port = settings.web_port if settings.web else None
    pages = HttpSettings(web_port, settings.gateway, origins, settings.trace_url)
    asyncio.run(run(mesh, agents, pages, at_terminal=at_terminal))


def start_agents(settings: Settings, metrics: Sequence[tuple[str, int]] = ()) -> AgentProcesses:
    """Start this machine's agent processes; their imports run in parallel with those of the services here.

    `metrics` are the addresses at which they serve their metrics, one for each, or none.
    """
    from cotenant.cli.mesh.agent_processes import AgentProcesses

    node_ids = node_ids_of(settings)
    return AgentProcesses(node_ids, dict(zip(node_ids, metrics, strict=False)))


def node_ids_of(settings: Settings) -> list[str]:
    """Return the ids of this machine's nodes.

    Raises:
        CommandError: there are fewer CPUs than nodes.
    """
    name, parts = node_name(), len(split_cpus(settings.nodes))
    return [name] if parts == 1 else [f"{name}-{number}" for number in range(1, parts + 1)]


def mesh_config(
    settings: Settings,
    state_dir: Path,
    options: dict[str, dict[str, str]],
    security_settings: SecuritySettings | None = None,
) -> MeshConfig:
    """Return the configuration of the mesh, made from settings.

    Raises:
        CommandError: a setting is invalid.
    """
    from cotenant.rpc import gc_tuning
    from cotenant.telemetry import plain_structlog  # noqa: F401 - before the modules of the services

    with gc_tuning.paused():
        from cotenant.cli.mesh.embedded import MeshConfig
        from cotenant.node_agent.control.agent_config import AgentConfig

    settings = with_profile(settings)
    parts = split_cpus(settings.nodes)
    agents = [
        AgentConfig(
            node_id=node_id,
            placement_endpoint="",  # filled in once the mesh has its port
            state_dir=state_dir / "nodes" / node_id,
            gpus=settings.gpus if number == 1 or settings.gpus != "auto" else "fake:0",  # a GPU belongs to one node
            cpus=cpus,
            machine_parts=len(parts),
            address="127.0.0.1",
            **agent_settings(settings),
            users=security_settings.users if security_settings else {},
            hidden=secret_paths(settings, security_settings, state_dir),
        )
        for number, (node_id, cpus) in enumerate(zip(node_ids_of(settings), parts, strict=True), 1)
    ]
    return MeshConfig(
        state_dir=state_dir,
        listen=settings.listen,
        store_url="" if settings.store == "sqlite" else settings.store,
        store_limits=read_store_limits(settings),
        agents=agents,
        queue=settings.queue,
        placement=settings.placement,
        allocator=settings.allocator,
        predictors=settings.predictors,
        contention=settings.contention,
        options=merged(settings.options, options),
        heartbeat_seconds=settings.heartbeat_seconds,
        lost_after_seconds=settings.lost_after_seconds,
        rules=sharing_rules(settings),
        window_seconds=settings.window_seconds,
        failure_rules=check_failure_rules(settings),
        retrying=retry_rules(settings),
        holding=hold_rules(settings),
        checkpoint_seconds=settings.checkpoint_seconds,
        profile_seconds=settings.profile_seconds,
        security_settings=security_settings,
        ended_jobs=settings.ended_jobs,
        ended_days=settings.ended_days,
        history_seconds=settings.history_seconds,
        archive=archive_path(settings, state_dir),
        folders=folder_rules(settings, state_dir),
        notifications=notification_rules(settings.sections),
    )


async def run(
    config: MeshConfig, agents: AgentProcesses | None = None, http: HttpSettings = NO_HTTP, *, at_terminal: bool = False
) -> None:
    """Run the mesh until a signal stops it, possibly during startup."""
    from cotenant import telemetry

    telemetry.setup("cotenant")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving, stopping = (
        asyncio.create_task(_serve(config, agents, http, at_terminal=at_terminal)),
        asyncio.create_task(stop.wait()),
    )
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            note("stopping the mesh; jobs keep running, and the next `cotenant up` re-attaches to them")
            serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        stopping.cancel()
        telemetry.shutdown()


async def _serve(
    config: MeshConfig, agents: AgentProcesses | None = None, http: HttpSettings = NO_HTTP, *, at_terminal: bool = False
) -> None:
    """Run the mesh, its dashboard and its gateway until cancelled."""
    async with AsyncExitStack() as closing:
        dashboard = None if http.web_port is None else open_dashboard(config, http)
        if dashboard:
            closing.push_async_callback(dashboard.close)
        if http.gateway:
            closing.push_async_callback(open_gateway(config, http.gateway, http.origins).close)
        await _serve_mesh(config, agents, dashboard, at_terminal=at_terminal)


def open_dashboard(config: MeshConfig, http: HttpSettings) -> Dashboard:
    """Listen for readers of the dashboard.

    Raises:
        CommandError: the port is in use.
    """
    from cotenant.cli.mesh.web_process import Dashboard

    return Dashboard(config.state_dir, http.web_port or 0, _tls_settings(config), http.trace_url)


def open_gateway(config: MeshConfig, address: str, origins: tuple[str, ...]) -> HttpProcess:
    """Listen for callers of the gateway, and print where.

    Raises:
        CommandError: the address is invalid or in use.
    """
    from cotenant.cli.mesh.http_process import HttpProcess, bind
    from cotenant.rpc.endpoints import host_and_port

    try:
        host, port = host_and_port(address)
    except ValueError as error:
        raise usage_error(f"--gateway {error}") from None
    tls = _tls_settings(config)
    https = bool(tls.get("cert") and tls.get("key"))
    listening = bind("the gateway", host, port, "choose another address with --gateway")
    note(f"gateway: {'https' if https else 'http'}://{address.rpartition(':')[0]}:{listening.getsockname()[1]}/")
    settings = {"state_dir": str(config.state_dir), "https": https, "origins": origins, **tls}
    return HttpProcess("cotenant.gateway", listening, settings)


def _tls_settings(config: MeshConfig) -> dict[str, str]:
    """Return the TLS files with which a process that serves HTTP reaches the mesh."""
    files = config.security_settings.tls_files if config.security_settings else None
    return {name: str(getattr(files, name) or "") for name in ("ca", "cert", "key")} if files else {}


async def _serve_mesh(
    config: MeshConfig, agents: AgentProcesses | None, dashboard: Dashboard | None, *, at_terminal: bool
) -> None:
    """Run the mesh until cancelled. After losing its leadership, as in a store outage, restart it in place."""
    from cotenant.rpc import gc_tuning

    gc_tuning.tune_gc()  # all is imported, and nothing loaded yet
    async with running_mesh(config, agents) as mesh:
        await notify_ready(mesh, at_terminal=at_terminal)
        if dashboard:
            note(f"dashboard: {dashboard.link()}")
        address, why = mesh.address, await mesh.lost()
    while True:
        note(f"the mesh lost its leadership and restarts: {why}")
        gc_tuning.refreeze()  # frees the state that it had loaded
        async with running_mesh(replace(config, listen=address), wait_for_store=True) as mesh:
            note(f"the mesh is up again at {mesh.address}")
            why = await mesh.lost()


async def _start(config: MeshConfig, agents: AgentProcesses | None, *, wait_for_store: bool) -> EmbeddedMesh:
    """Start a mesh; with `wait_for_store`, wait for its store and for its port to become available."""
    from cotenant.cli.mesh.embedded import start_mesh
    from cotenant.rpc.server import CannotListen
    from cotenant.store.port import StoreUnavailable

    while True:
        try:
            return await start_mesh(config, agents)
        except (StoreUnavailable, CannotListen) as error:
            if not wait_for_store:
                raise
            note(f"cannot start yet: {error}")
        await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def running_mesh(
    config: MeshConfig, agents: AgentProcesses | None = None, *, wait_for_store: bool = False
) -> AsyncIterator[EmbeddedMesh]:
    """Run the mesh inside the context; translate startup errors for users."""
    from cotenant import plugins
    from cotenant.cli.mesh.agent_processes import AgentFailed
    from cotenant.leadership.leadership_set import LedByAnotherProcess
    from cotenant.rpc.access import AccessError
    from cotenant.rpc.server import CannotListen
    from cotenant.store.port import StoreDistrusted, StoreInUse, StoreUnavailable
    from cotenant.store.schema import BadRecord, NewerSchema

    mesh: EmbeddedMesh | None = None
    try:
        try:
            mesh = await _start(config, agents, wait_for_store=wait_for_store)
            await mesh.nodes_ready()
        except (plugins.UnknownPolicy, plugins.BadOption, ValueError) as error:
            raise usage_error(
                str(error), hint="`cotenant policies` lists policies, `cotenant up --help` options"
            ) from None
        except StoreInUse as error:
            hint = "another `cotenant up` uses this state directory; stop it, or pass --state-dir"
            raise CommandError(str(error), hint=hint) from None
        except LedByAnotherProcess as error:
            hint = "a store serves one mesh; to run several processes of a service on one etcd, use `cotenant serve`"
            raise CommandError(str(error), hint=hint) from None
        except StoreDistrusted as error:
            raise CommandError(f"{error.reason}: {error}", hint=error.remedy) from None
        except StoreUnavailable as error:
            raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
        except AgentFailed as error:
            raise CommandError(str(error), code=ExitCode.USAGE if error.bad_settings else ExitCode.FAILED) from None
        except (NewerSchema, BadRecord, CannotListen, AccessError, OSError) as error:
            raise CommandError(str(error)) from None
        yield mesh
    finally:
        if mesh:
            await mesh.close()


def _shares_disk(config: MeshConfig) -> str:
    """Return a warning if jobs can fill the store's file system; "" otherwise."""
    nodes = [agent.state_dir for agent in config.agents]
    try:
        together = not config.store_url and any(one.stat().st_dev == config.state_dir.stat().st_dev for one in nodes)
    except OSError:
        return ""
    reserve = config.store_limits.reserve_bytes // 2**20
    return (
        f"job directories share a file system with the store; below {reserve} MiB of free space the largest jobs are "
        f"stopped. To separate them, mount another file system at {config.state_dir / 'nodes'}"
        if together
        else ""
    )


async def notify_ready(mesh: EmbeddedMesh, *, at_terminal: bool = False) -> None:
    """Print what runs and how to reach it once the mesh's nodes are ready."""
    from cotenant.rpc.access import default_state_dir

    nodes, config = await mesh.nodes_ready(), mesh.config
    options = welcome.options_for(config.state_dir, default_state_dir(os.environ))
    lines = welcome.terminal_lines if at_terminal else welcome.log_lines
    for line in lines(config, mesh.address, nodes, options, _shares_disk(config)):
        note(line)
