"""`cotenant serve`: one service of the mesh in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cotenant import file_descriptors
from cotenant.cli.annotations import typer
from cotenant.cli.flags import Flags
from cotenant.cli.mesh import metrics_endpoints
from cotenant.cli.mesh.armed_fail_points import arm_fail_points
from cotenant.cli.mesh.nested_agent import (
    NestedOptions,
    nested_node_name,
    nested_settings,
    own_address,
    read_nesting,
)
from cotenant.cli.mesh.notification_options import notification_rules
from cotenant.cli.mesh.readiness import notify_ready
from cotenant.cli.mesh.security_options import (
    ALLOW_ORIGIN_HELP,
    SecuritySettings,
    check_listen,
    make_security,
    read_allowed_origins,
    read_security_settings,
    secure_calls,
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
    with_profile,
)
from cotenant.cli.mesh.shared_identity import secret_paths
from cotenant.cli.mesh.slurm_acts import ActOptions, read_acts, read_patterns
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.missing_extras import check_extras
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.profile_names import complete_profiles
from cotenant.cli.units import parse_bytes
from cotenant.core.policy.profiles import DEFAULT
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:
    from cotenant.node_agent.probes.outer_job import Nesting
    from cotenant.rpc.endpoints import Endpoints

PORTS = {"queue": 7070, "placement": 7071, "predictor": 7072, "contention": 7073}
HTTP_PORTS = {"web": 7074, "gateway": 7075}
SLURM = "slurm"
SLURM_PORT = 7076
SERVICES = (*PORTS, "agent", *HTTP_PORTS, SLURM)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


@dataclass(frozen=True, slots=True)
class ServiceSetup:
    """The settings that all services share."""

    settings: Settings
    options: dict[str, dict[str, str]]
    state_dir: Path
    listen: str
    store_url: str
    token: str
    endpoints: str
    security_settings: SecuritySettings
    address: str = ""
    origins: tuple[str, ...] = ()  # of pages that may call the gateway


@dataclass(frozen=True, slots=True)
class AgentOffer:
    """What an agent offers, as its options say; `nesting` is set in a job of another system."""

    node: str
    gpus: str
    cpus: tuple[int, ...] | None
    memory_bytes: int | None
    address: str
    nesting: Nesting | None

    def settings(self) -> dict[str, Any]:
        """Return the settings as arguments of `AgentConfig`."""
        if self.nesting is None:
            node = self.node or node_name()
            bounds: dict[str, Any] = {"cpus": self.cpus, "memory_bytes": self.memory_bytes}
            address = self.address or node
        else:
            node = self.node or nested_node_name(self.nesting.job, os.environ)
            bounds = nested_settings(self.nesting, self.cpus, self.memory_bytes)
            address = self.address or own_address()
        return {"node_id": node, "gpus": self.gpus, "address": address, **bounds}


def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=f"One of {', '.join(SERVICES)}.")],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in TOML; flags override them.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address to listen on.")] = None,
    metrics: Annotated[str | None, typer.Option(metavar=metrics_endpoints.METAVAR, help=metrics_endpoints.HELP)] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="sqlite, sqlite:PATH or etcd://HOST:PORT,…")] = None,
    endpoints: Annotated[
        str, typer.Option(metavar="…", help="Addresses of the services: HOST:PORT, or NAME=…,NAME=…; replicas: A|B.")
    ] = "",
    node: Annotated[str, typer.Option(metavar="ID", help="Node id of the agent; default: the host name.")] = "",
    gpus: Annotated[
        str | None, typer.Option(metavar="auto|fake:N", help="GPUs of the agent: found by NVML, or declared.")
    ] = None,
    cpus: Annotated[str, typer.Option(metavar="0-3,8", help="CPUs for jobs; default: all.")] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for jobs; default: all.")] = "",
    scratch: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            envvar="COTENANT_SCRATCH_DIRECTORY",
            help="Directory for jobs' scratch space, which has the size of its file system; default: none.",
        ),
    ] = "",
    address: Annotated[
        str, typer.Option(metavar="HOST", help="Address of this machine for others; default: its name.")
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Policies that work together; `cotenant policies --profile` lists them.",
            show_default=DEFAULT,
            autocompletion=complete_profiles,
        ),
    ] = "",
    follow: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Predictor that records observations; this one only reads its models."),
    ] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(metavar="URL", help=ALLOW_ORIGIN_HELP)] = None,
    trace_url: Annotated[str, typer.Option(metavar="URL", help=TRACE_URL_HELP)] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without TLS.")] = False,
    shared_identity: Annotated[
        bool, typer.Option("--shared-identity", help="Let an agent without root run other users' jobs as its own user.")
    ] = False,
    share_machine: Annotated[
        bool,
        typer.Option(
            "--share-machine",
            envvar="COTENANT_SHARE_MACHINE",
            help="Let the agent offer CPUs and GPUs that another agent on this machine offers as well.",
        ),
    ] = False,
    nested: Annotated[
        bool | None,
        typer.Option(
            "--nested/--no-nested",
            help="Whether the agent stays within the job of another system that it runs in.",
            show_default="in a job of Slurm, LSF or Kubernetes",
        ),
    ] = None,
    until: Annotated[
        str, typer.Option(metavar="TIME", help="When a nested agent's outer job ends; default: what Slurm says.")
    ] = "",
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="The same, from now: 8h.")] = "",
    drain_before: Annotated[
        str, typer.Option(metavar="TIME", help="How long before that the agent's node is drained.", show_default="5m")
    ] = "",
    idle: Annotated[
        str, typer.Option(metavar="TIME", help="End a nested agent that has had nothing to run for this long.")
    ] = "",
    option: Annotated[
        list[str] | None, typer.Option(metavar="GROUP.KEY=VALUE", help="Policy option; repeatable.")
    ] = None,
    restd: Annotated[
        Path | None, typer.Option(metavar="SOCKET", help="Read Slurm from slurmrestd's Unix socket.")
    ] = None,
    act: Annotated[
        list[str] | None,
        typer.Option(
            metavar="cores|order|nodes", help="What the bridge to Slurm changes; repeatable. Default: nothing."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --act: list what would be changed, and change nothing.")
    ] = False,
    cores_table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --act cores: the table for slurmctld.", show_default="in the state directory"
        ),
    ] = None,
    cpus_per_gpu: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --act cores: the most CPUs per GPU.", show_default="a GPU's share of its node"
        ),
    ] = None,
    override_cpus: Annotated[
        bool, typer.Option("--override-cpus", help="With --act cores: also change jobs whose users named their CPUs.")
    ] = False,
    order_by: Annotated[
        str, typer.Option(metavar="POLICY", help="With --act order: the queue policy.", show_default="srsf")
    ] = "",
    order_weight: Annotated[
        int | None, typer.Option(metavar="N", help="With --act order: the largest SiteFactor.", show_default="100000")
    ] = None,
    nodes_by: Annotated[
        str, typer.Option(metavar="POLICY", help="With --act nodes: the placement policy.", show_default="fgd")
    ] = "",
    progress_regex: Annotated[
        list[str] | None,
        typer.Option(
            metavar="default|REGEX",
            help="Read the progress of Slurm's jobs from their output; repeatable. The first group is the step, one "
            "named total the last step.",
            show_default="not read",
        ),
    ] = None,
    interval: Annotated[str, typer.Option(metavar="TIME", help="How often Slurm is read.", show_default="5s")] = "",
) -> None:
    """Run one service of the mesh in the foreground: a service, an agent, the dashboard or the gateway.

    All services share a token, from COTENANT_TOKEN or from the file `token` in the state directory, which the first
    service creates. Without --listen they listen on loopback ports 7070 (queue), 7071 (placement), 7072 (predictor) and
    7073 (contention); without --endpoints they look for each other there. Each service passes calls for the others to
    their --endpoints, so give all services all four.

    With the store `sqlite`, each service keeps its own file in the state directory; several machines share an etcd.
    With etcd, each service may have several replicas: one leads, the others forward to it, and when it fails another
    takes over. A predictor with --follow records no observations and reads those of another predictor.

    Serving other machines needs TLS: --tls-ca, --tls-cert and --tls-key, or [tls] in the settings. Certificates then
    authenticate every part and no token is needed; create them with `cotenant certs`.

    web is the dashboard, on loopback port 7074 without --listen. Its readers log in with their own API tokens, and see
    and do what those allow. With a certificate it serves HTTPS.

    In a job of Slurm, LSF or Kubernetes an agent is nested: it offers only what that job was given, keeps its own jobs
    within that job's control groups, and drains its node before that job ends. See docs/pilots.md.

    gateway is the API as JSON over HTTP, on loopback port 7075 without --listen: a client of the mesh that passes its
    callers' API tokens on. With a certificate it serves HTTPS. GET /openapi.json describes it. Pages of other sites may
    call it from a browser only if --allow-origin names them.

    slurm needs no other service: beside a slurmctld it answers `cotenant jobs`, `explain`, `whatif` and other commands
    that read, on loopback port 7076 without --listen. The jobs stay Slurm's. Nothing is written to Slurm
    unless --act says so: `cores` gives GPU jobs the cores that they need when they are submitted, `order` orders the
    pending jobs, `nodes` chooses their nodes. See docs/slurm-bridge.md.

    \b
    Examples:
      cotenant serve placement --metrics 127.0.0.1:9464
      cotenant serve queue --store etcd://10.0.0.1:2379 --listen 0.0.0.0:7070 --address 10.0.0.5 --config head.toml
      cotenant serve predictor --store etcd://10.0.0.1:2379 --listen 0.0.0.0:7082 --follow 10.0.0.5:7072 --insecure
      cotenant serve agent --endpoints 'placement=10.0.0.5:7071|10.0.0.6:7071' --gpus auto
      cotenant serve agent --nested --endpoints placement=10.0.0.5:7071 --for 8h --idle 10m
      cotenant serve web --endpoints queue=10.0.0.5:7070 --listen 0.0.0.0:7074 --address head.example.org
      cotenant serve gateway --endpoints 10.0.0.5:7070 --listen 127.0.0.1:7075
      cotenant serve gateway --allow-origin https://portal.example.org
      cotenant serve slurm --restd /run/slurmrestd.sock
      cotenant serve slurm --act cores --act order --dry-run
      cotenant serve slurm --progress-regex default
    """
    if service not in SERVICES:
        raise usage_error(
            f"unknown service {service!r}{did_you_mean(service, SERVICES)}; services are {', '.join(SERVICES)}"
        )
    check_extras(f"cotenant serve {service}", "agent" if service == "agent" else "server")
    arm_fail_points()
    file_descriptors.raise_limit()
    settings = read_settings(config)
    settings = replace(
        settings,
        shared_identity=settings.shared_identity or shared_identity,
        share_machine=settings.share_machine or share_machine,
        scratch_directory=scratch or settings.scratch_directory,
        trace_url=trace_url or settings.trace_url,
    )
    if trace_url and service != "web":
        raise usage_error("--trace-url is for the dashboard: `cotenant serve web`")
    check_trace_url(settings.trace_url)
    if follow is not None:
        settings = replace(settings, follow=follow)
    settings = with_profile(replace(settings, profile=profile or settings.profile))
    if settings.follow and service == "predictor" and not (store or settings.store).startswith(("etcd:", "etcds:")):
        raise usage_error("--follow needs an etcd shared with the other predictor: --store etcd://HOST:PORT")
    addresses = metrics_endpoints.metrics_addresses(settings.metrics if metrics is None else metrics)
    tuning = cores_table, cpus_per_gpu, override_cpus, order_by, order_weight, interval, nodes_by
    acts = ActOptions(act or (), dry_run, *tuning, progress=progress_regex or ())
    if service != SLURM and (given := acts.given()):
        raise usage_error(f"{' and '.join(given)} must be used with `cotenant serve slurm`")
    state_dir = resolve_state_dir(context)
    security_settings = read_security_settings(settings.sections, Flags.of(context), insecure=insecure)
    if allow_origin and service != "gateway":
        raise usage_error("--allow-origin is for the gateway")
    if listen and service != "agent":
        check_listen(listen, security_settings)
    setup = ServiceSetup(
        settings=settings,
        options=merged(settings.options, read_options(option or ())),
        state_dir=state_dir,
        listen=listen or f"127.0.0.1:{(PORTS | HTTP_PORTS | {SLURM: SLURM_PORT}).get(service, 0)}",
        store_url=_store_url(store or settings.store, state_dir, service),
        token=os.environ.get("COTENANT_TOKEN", "") if security_settings.mutual else _token(state_dir),
        security_settings=security_settings,
        address=address,
        origins=read_allowed_origins(allow_origin or ()) if service == "gateway" else (),
        endpoints=endpoints or ",".join(f"{name}=127.0.0.1:{port}" for name, port in PORTS.items()),
    )
    for address_of_metrics in addresses:
        metrics_endpoints.expose_metrics(*address_of_metrics)
    if service in HTTP_PORTS:
        _become(service, setup)
    if service == "agent":
        nesting = read_nesting(NestedOptions(nested, until, duration, drain_before, idle), os.environ)
        offer = AgentOffer(node, gpus or settings.gpus, _cpus(cpus), _memory(memory), address, nesting)
        work = _agent(setup, offer)
    elif service == SLURM:
        work = _slurm(setup, restd, acts)
    else:
        work = _service(service, setup)
    asyncio.run(_until_signal(work))


def _become(service: str, setup: ServiceSetup) -> NoReturn:
    """Become the process of the dashboard or of the gateway."""
    from cotenant.cli.mesh import http_process, login_links
    from cotenant.rpc.endpoints import host_and_port

    files, endpoints = setup.security_settings.tls_files, _endpoints(setup)
    listening = http_process.bind(service, *host_and_port(setup.listen), "choose another address with --listen")
    listening.set_inheritable(True)
    https = bool(files and files.cert and files.key)
    settings = {
        "fd": listening.fileno(),
        "state_dir": str(setup.state_dir),
        "endpoint": ",".join(f"{name}={address}" for name, address in endpoints._asdict().items() if address),
        "https": https,
        **({name: str(getattr(files, name) or "") for name in ("ca", "cert", "key")} if files else {}),
    }
    host, port = setup.listen.rpartition(":")[0], listening.getsockname()[1]
    url = f"{'https' if https else 'http'}://{setup.address or host}:{port}/"
    note(f"{service} serves at {url}")
    if service == "gateway":
        settings["origins"] = setup.origins
    if service == "web":
        settings["trace_url"] = setup.settings.trace_url
        settings["names"] = [name for name in (setup.address, socket.gethostname(), socket.getfqdn()) if name]
        if setup.token and not setup.security_settings.mutual and not os.environ.get("COTENANT_TOKEN"):
            note(f"dashboard: {url}login?token={login_links.mint(setup.state_dir)}")
    notify_ready()
    command = http_process.command(f"cotenant.{service}", settings)
    os.execv(command[0], command)


def _store_url(store: str, state_dir: Path, service: str) -> str:
    """Return the store URL; for a file in the state directory, create the directory."""
    from cotenant.rpc.access import AccessError, ensure_private

    if store != "sqlite" or service in ("agent", *HTTP_PORTS):
        return store
    try:
        ensure_private(state_dir)
    except AccessError as error:
        raise CommandError(str(error)) from None
    return f"sqlite:{state_dir / service}.sqlite"


def _token(state_dir: Path) -> str:
    from cotenant.rpc.access import AccessError, ensure_token

    try:
        return os.environ.get("COTENANT_TOKEN") or ensure_token(state_dir)
    except AccessError as error:
        raise CommandError(str(error)) from None


def _cpus(text: str) -> tuple[int, ...] | None:
    """Return a list of CPUs given in the kernel's notation.

    >>> _cpus("0-2,8")
    (0, 1, 2, 8)
    """
    if not text:
        return None
    try:
        ranges = [part.partition("-") for part in text.split(",")]
        return tuple(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except ValueError:
        raise usage_error(f"--cpus must be a list such as 0-3,8, not {text!r}") from None


def _memory(text: str) -> int | None:
    """Return an amount of memory; None for "".

    >>> _memory("2GiB")
    2147483648
    """
    try:
        return parse_bytes(text) if text else None
    except ValueError as error:
        raise usage_error(f"--memory {error}") from None


def _service(service: str, setup: ServiceSetup) -> Coroutine[Any, Any, None]:
    """Return the coroutine that runs one of the four services."""
    from cotenant.rpc import gc_tuning
    from cotenant.telemetry import plain_structlog  # noqa: F401 - before the modules of the service

    common: dict[str, Any] = {
        "address": setup.listen,
        "store_url": setup.store_url,
        "token": setup.token,
        "endpoints": _endpoints(setup),
    }
    if service != "contention":  # contention has no store
        from cotenant.store.witness_file import path_of

        common["memory"] = path_of(setup.state_dir, service)
    common["security"] = make_security(setup.security_settings, setup.state_dir, service, setup.token)

    def started(port: int) -> None:
        note(f"{service} serves at {setup.listen.rpartition(':')[0]}:{port}")
        notify_ready()

    common["on_start"] = started
    compose = {"placement": _placement, "predictor": _predictor, "contention": _contention, "queue": _queue}
    with gc_tuning.paused():
        work = compose[service](setup, common)
    gc_tuning.tune_gc()  # all is imported, and nothing loaded yet
    return work


def _placement(setup: ServiceSetup, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.services.placement.__main__ import serve as run
    from cotenant.services.placement.api.server import PlacementConfig
    from cotenant.services.placement.planning.cluster_view import StopCosts

    settings, options = setup.settings, setup.options
    config = PlacementConfig(
        placement=settings.placement,
        allocator=settings.allocator,
        options={
            settings.placement: options.get("placement", {}),
            settings.allocator: options.get("allocator", {}),
        },
        heartbeat_seconds=settings.heartbeat_seconds,
        lost_after_seconds=settings.lost_after_seconds,
        stop_costs=StopCosts(settings.checkpoint_seconds),
        holding=hold_rules(settings),
    )
    return run(**common, config=config, advertised=setup.address)


def _predictor(setup: ServiceSetup, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.core.policy.options import options_by_policy
    from cotenant.services.predictor.__main__ import serve as run
    from cotenant.services.predictor.api.server import Config
    from cotenant.services.predictor.profiling.profile_planner import ProfileRules

    names = setup.settings.predictors
    options = options_by_policy(names, setup.options.get("predictor", {}))
    profiles = ProfileRules(seconds=setup.settings.profile_seconds)
    follow = setup.settings.follow
    config = Config(predictors=names, options=options, profiles=profiles, follow=follow)
    return run(**common, config=config, advertised=setup.address)


def _contention(setup: ServiceSetup, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.services.contention.__main__ import serve as run
    from cotenant.services.contention.api.server import Config

    config = Config(policy=setup.settings.contention, options=setup.options.get("contention", {}))
    return run(**common, config=config)


def _queue(setup: ServiceSetup, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.security.secret_keys import KEYS_FILE
    from cotenant.services.queue.__main__ import serve as run
    from cotenant.services.queue.api.server import QueueConfig

    config = QueueConfig(
        policy=setup.settings.queue,
        options={setup.settings.queue: setup.options.get("queue", {})},
        allocator=setup.settings.allocator,
        allocator_options=setup.options.get("allocator", {}),
        rules=sharing_rules(setup.settings),
        window_seconds=setup.settings.window_seconds,
        failure_rules=check_failure_rules(setup.settings),
        retrying=retry_rules(setup.settings),
        tenant_jobs_max=setup.security_settings.limits.jobs_per_tenant,
        tenant_bytes_max=setup.security_settings.limits.bytes_per_tenant,
        store_limits=read_store_limits(setup.settings),
        notifications=notification_rules(setup.settings.sections),
        ended_kept_max=setup.settings.ended_jobs,
        ended_kept_seconds=setup.settings.ended_days * 86_400,
        history_seconds=setup.settings.history_seconds,
        archive=archive_path(setup.settings, setup.state_dir),
        folders=folder_rules(setup.settings, setup.state_dir),
        secret_keys=setup.state_dir / KEYS_FILE,
    )
    return run(**common, config=config, advertised=setup.address)


def _endpoints(setup: ServiceSetup) -> Endpoints:
    from cotenant.rpc.endpoints import Endpoints

    try:
        return Endpoints.parse(setup.endpoints)
    except ValueError as error:
        raise usage_error(str(error)) from None


def _slurm(setup: ServiceSetup, restd: Path | None, acts: ActOptions) -> Coroutine[Any, Any, None]:
    """Return the coroutine that runs the bridge to Slurm, with a predictor of its own."""
    from cotenant.cli.mesh.slurm_bridge import BridgeSettings, serve_bridge

    def started(port: int) -> None:
        address = f"{setup.listen.rpartition(':')[0]}:{port}"
        note(f"slurm serves at {address}: cotenant --endpoint {address} jobs")
        notify_ready()

    act_config, interval_seconds = read_acts(acts, setup.state_dir)
    patterns = read_patterns(acts.progress)
    security = make_security(setup.security_settings, setup.state_dir, SLURM, setup.token)
    settings = BridgeSettings(
        state_dir=setup.state_dir,
        listen=setup.listen,
        token=setup.token,
        store_url=setup.store_url,
        predictors=setup.settings.predictors,
        options=setup.options,
        allocator=setup.settings.allocator,
        restd=restd,
        interval_seconds=interval_seconds,
        progress=patterns,
        acts=act_config,
    )
    return serve_bridge(settings, security, started)


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run a service until SIGINT or SIGTERM; translate startup errors for users."""
    from cotenant import plugins
    from cotenant.node_agent.control.state_directory import AgentAlreadyRunning, NodeMismatch
    from cotenant.node_agent.runtime.socket_paths import UnsafeDirectory
    from cotenant.rpc.server import CannotListen
    from cotenant.store.port import StoreDistrusted, StoreInUse, StoreUnavailable
    from cotenant.store.schema import BadRecord, NewerSchema

    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    except (plugins.UnknownPolicy, plugins.BadOption, ValueError) as error:
        raise usage_error(str(error)) from None
    except StoreDistrusted as error:
        raise CommandError(f"{error.reason}: {error}", hint=error.remedy) from None
    except StoreUnavailable as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    except (
        StoreInUse,
        NewerSchema,
        BadRecord,
        CannotListen,
        AgentAlreadyRunning,
        NodeMismatch,
        UnsafeDirectory,
        OSError,
    ) as error:
        raise CommandError(str(error)) from None


async def _agent(setup: ServiceSetup, offer: AgentOffer) -> None:
    from cotenant import telemetry
    from cotenant.node_agent.__main__ import serve as serve_agent
    from cotenant.node_agent.control.agent_config import AgentConfig

    settings, endpoints, offered = setup.settings, _endpoints(setup), offer.settings()
    secure_calls(setup.security_settings)
    telemetry.setup("agent")
    try:
        await serve_agent(
            AgentConfig(
                state_dir=setup.state_dir / "nodes" / offered["node_id"],
                placement_endpoint=endpoints.placement,
                contention_endpoint=endpoints.contention,
                token=setup.token,
                **offered,
                **agent_settings(settings),
                users=setup.security_settings.users,
                hidden=secret_paths(settings, setup.security_settings, setup.state_dir),
            ),
            notify_ready,
        )
    finally:
        telemetry.shutdown()
