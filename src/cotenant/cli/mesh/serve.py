"""`cotenant serve`: one service of the mesh in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cotenant import file_descriptors
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.armed_fail_points import arm_fail_points
from cotenant.cli.mesh.readiness import tell_ready
from cotenant.cli.mesh.security_options import Guarding, check_listen, guarding_of, secure_calls, security_of
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
    store_limits_of,
)
from cotenant.cli.mesh.shared_identity import secret_paths
from cotenant.cli.mesh.up import BACKFILL, state_dir_of
from cotenant.cli.outcome import CommandError, ExitCode, note, usage
from cotenant.cli.units import parse_bytes
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:
    from cotenant.rpc.endpoints import Endpoints

PORTS = {"queue": 7070, "placement": 7071, "predictor": 7072, "contention": 7073}
SERVICES = (*PORTS, "agent")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(serve)


@dataclass(frozen=True, slots=True)
class Told:
    """What every service is told."""

    settings: Settings
    options: dict[str, dict[str, str]]
    state_dir: Path
    listen: str
    store_url: str
    token: str
    endpoints: str
    guarding: Guarding
    address: str = ""


def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=f"One of {', '.join(SERVICES)}.")],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in TOML; flags win over them.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to serve.")] = None,
    store: Annotated[str | None, typer.Option(metavar="URL", help="sqlite, sqlite:PATH or etcd://HOST:PORT,…")] = None,
    endpoints: Annotated[
        str, typer.Option(metavar="…", help="Where the others are: HOST:PORT, or NAME=…,NAME=…; replicas: A|B.")
    ] = "",
    node: Annotated[str, typer.Option(metavar="ID", help="The agent's node; this machine's name.")] = "",
    gpus: Annotated[str | None, typer.Option(metavar="auto|fake:N", help="The agent's GPUs.")] = None,
    cpus: Annotated[str, typer.Option(metavar="0-3,8", help="The CPUs that the agent may give to jobs; all.")] = "",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="The memory that the agent may give to jobs; all.")] = "",
    address: Annotated[str, typer.Option(metavar="HOST", help="Where others reach this machine; its name.")] = "",
    follow: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The predictor that takes observations; this one reads what it keeps."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other machines without TLS.")] = False,
    shared_identity: Annotated[
        bool, typer.Option("--shared-identity", help="An agent that is not root runs other people's jobs as its user.")
    ] = False,
    share_machine: Annotated[
        bool,
        typer.Option(
            "--share-machine",
            envvar="COTENANT_SHARE_MACHINE",
            help="The agent offers CPUs and GPUs that another agent on this machine offers too.",
        ),
    ] = False,
    option: Annotated[
        list[str] | None, typer.Option(metavar="GROUP.KEY=VALUE", help="An option of a policy; repeatable.")
    ] = None,
) -> None:
    """Run one service of the mesh in the foreground: queue, placement, predictor, contention or agent.

    All of them read the same token: from COTENANT_TOKEN, else from the file `token` of the state directory, which the
    first one makes. Without --listen they serve on loopback at the ports 7070 (queue), 7071 (placement), 7072
    (predictor) and 7073 (contention); without --endpoints they look for each other there. With the store `sqlite`
    each keeps a file of its own in the state directory; several machines share an etcd. There each may run
    several times: one leads, the others pass on to it what only it can answer, and when it ends another one leads.
    A predictor that is to take no observations at all names the one that does with --follow.

    Other machines are served with TLS: --tls-ca, --tls-cert and --tls-key, or [tls] in the settings. Then every part
    is known by its certificate, and no token is needed; `cotenant certs` makes certificates.

    \b
    Examples:
      cotenant serve placement
      cotenant serve queue --store etcd://10.0.0.1:2379 --listen 0.0.0.0:7070 --address 10.0.0.5 --config head.toml
      cotenant serve predictor --store etcd://10.0.0.1:2379 --listen 0.0.0.0:7082 --follow 10.0.0.5:7072 --insecure
      cotenant serve agent --endpoints 'placement=10.0.0.5:7071|10.0.0.6:7071' --gpus auto
    """
    if service not in SERVICES:
        raise usage(f"there is no service {service!r}{did_you_mean(service, SERVICES)}; {', '.join(SERVICES)} are")
    arm_fail_points()
    file_descriptors.raise_limit()
    settings = read_settings(config)
    settings = replace(
        settings,
        shared_identity=settings.shared_identity or shared_identity,
        share_machine=settings.share_machine or share_machine,
    )
    if follow is not None:
        settings = replace(settings, follow=follow)
    if settings.follow and service == "predictor" and not (store or settings.store).startswith(("etcd:", "etcds:")):
        raise usage("to follow another predictor takes the etcd that both share: --store etcd://HOST:PORT")
    state_dir = state_dir_of(context)
    guarding = guarding_of(settings.sections, Flags.of(context), insecure=insecure)
    if listen and service != "agent":
        check_listen(listen, guarding)
    told = Told(
        settings=settings,
        options=merged(BACKFILL if settings.queue == "fifo" else {}, settings.options, read_options(option or ())),
        state_dir=state_dir,
        listen=listen or f"127.0.0.1:{PORTS.get(service, 0)}",
        store_url=_store_url(store or settings.store, state_dir, service),
        token=os.environ.get("COTENANT_TOKEN", "") if guarding.mutual else _token(state_dir),
        guarding=guarding,
        address=address,
        endpoints=endpoints or ",".join(f"{name}=127.0.0.1:{port}" for name, port in PORTS.items()),
    )
    if service == "agent":
        part = _cpus(cpus), _memory(memory)
        work = _agent(told, node or node_name(), gpus or settings.gpus, part, address)
    else:
        work = _service(service, told)
    asyncio.run(_until_signal(work))


def _store_url(store: str, state_dir: Path, service: str) -> str:
    """Name the store; a file of the state directory gets one, which with certificates no token has made."""
    from cotenant.rpc.access import NoAccess, ensure_private

    if store != "sqlite" or service == "agent":
        return store
    try:
        ensure_private(state_dir)
    except NoAccess as error:
        raise CommandError(str(error)) from None
    return f"sqlite:{state_dir / service}.sqlite"


def _token(state_dir: Path) -> str:
    from cotenant.rpc.access import NoAccess, ensure_token

    try:
        return os.environ.get("COTENANT_TOKEN") or ensure_token(state_dir)
    except NoAccess as error:
        raise CommandError(str(error)) from None


def _cpus(text: str) -> tuple[int, ...] | None:
    """Read a list of CPUs as the kernel writes it.

    >>> _cpus("0-2,8")
    (0, 1, 2, 8)
    """
    if not text:
        return None
    try:
        ranges = [part.partition("-") for part in text.split(",")]
        return tuple(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except ValueError:
        raise usage(f"{text!r} is no list of CPUs; write it like 0-3,8") from None


def _memory(text: str) -> int | None:
    """Read an amount of memory; None for "".

    >>> _memory("2GiB")
    2147483648
    """
    try:
        return parse_bytes(text) if text else None
    except ValueError as error:
        raise usage(f"--memory cannot be taken: {error}") from None


def _service(service: str, told: Told) -> Coroutine[Any, Any, None]:
    """Compose one of the four services."""
    from cotenant.rpc import gc_tuning

    common: dict[str, Any] = {"address": told.listen, "store_url": told.store_url, "token": told.token}
    if service != "contention":  # which keeps nothing
        from cotenant.store.witness_file import path_of

        common["memory"] = path_of(told.state_dir, service)
    common["security"] = security_of(told.guarding, told.state_dir, service, told.token)

    def started(port: int) -> None:
        gc_tuning.settle()
        note(f"{service} serves at {told.listen.rpartition(':')[0]}:{port}")
        tell_ready()

    common["on_start"] = started
    compose = {"placement": _placement, "predictor": _predictor, "contention": _contention, "queue": _queue}
    return compose[service](told, common)


def _placement(told: Told, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.services.placement.__main__ import serve as run
    from cotenant.services.placement.api.server import PlacementConfig
    from cotenant.services.placement.planning.cluster_view import StopCosts

    settings, options = told.settings, told.options
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
        holding=holding_of(settings),
    )
    return run(**common, config=config, advertised=told.address)


def _predictor(told: Told, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.core.policy.options import by_owner
    from cotenant.services.predictor.__main__ import serve as run
    from cotenant.services.predictor.api.server import Config
    from cotenant.services.predictor.profiling.profile_planner import ProfileRules

    names = told.settings.predictors
    options = by_owner(names, told.options.get("predictor", {}))
    profiles = ProfileRules(seconds=told.settings.profile_seconds)
    follow = told.settings.follow
    config = Config(predictors=names, options=options, profiles=profiles, follow=follow)
    return run(**common, config=config, advertised=told.address)


def _contention(told: Told, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.services.contention.__main__ import serve as run
    from cotenant.services.contention.api.server import Config

    config = Config(policy=told.settings.contention, options=told.options.get("contention", {}))
    return run(**common, config=config, queue=_endpoints(told).queue)


def _queue(told: Told, common: dict[str, Any]) -> Coroutine[Any, Any, None]:
    from cotenant.services.queue.__main__ import serve as run
    from cotenant.services.queue.api.server import QueueConfig

    config = QueueConfig(
        policy=told.settings.queue,
        options={told.settings.queue: told.options.get("queue", {})},
        rules=rules_of(told.settings),
        window_seconds=told.settings.window_seconds,
        failure_rules=check_failure_rules(told.settings),
        retrying=retrying_of(told.settings),
        tenant_jobs_max=told.guarding.limits.jobs_per_tenant,
        tenant_bytes_max=told.guarding.limits.bytes_per_tenant,
        store_limits=store_limits_of(told.settings),
        ended_kept_max=told.settings.ended_jobs,
        ended_kept_seconds=told.settings.ended_days * 86_400,
        history_seconds=told.settings.history_seconds,
        archive=archive_of(told.settings, told.state_dir),
    )
    return run(**common, endpoints=_endpoints(told), config=config, advertised=told.address)


def _endpoints(told: Told) -> Endpoints:
    from cotenant.rpc.endpoints import Endpoints

    try:
        return Endpoints.parse(told.endpoints)
    except ValueError as error:
        raise usage(str(error)) from None


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run a service until SIGINT or SIGTERM; what keeps it from starting is told in a user's words."""
    from cotenant import plugins
    from cotenant.node_agent.control.state_directory import AnotherAgent, AnotherNode
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
        raise usage(str(error)) from None
    except StoreDistrusted as error:
        raise CommandError(f"{error.reason}: {error}", hint=error.remedy) from None
    except StoreUnavailable as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    except (
        StoreInUse,
        NewerSchema,
        BadRecord,
        CannotListen,
        AnotherAgent,
        AnotherNode,
        UnsafeDirectory,
        OSError,
    ) as error:
        raise CommandError(str(error)) from None


async def _agent(
    told: Told, node: str, gpus: str, part: tuple[tuple[int, ...] | None, int | None], address: str
) -> None:
    from cotenant import telemetry
    from cotenant.node_agent.__main__ import serve as serve_agent
    from cotenant.node_agent.control.agent_config import AgentConfig

    settings, endpoints = told.settings, _endpoints(told)
    secure_calls(told.guarding)
    telemetry.setup("agent")
    try:
        await serve_agent(
            AgentConfig(
                node_id=node,
                state_dir=told.state_dir / "nodes" / node,
                placement_endpoint=endpoints.placement,
                contention_endpoint=endpoints.contention,
                token=told.token,
                gpus=gpus,
                cpus=part[0],
                memory_bytes=part[1],
                rack=settings.rack,
                address=address or node,
                shareable_gpus=settings.shareable_gpus,
                split_siblings=settings.split_siblings,
                sample_interval_seconds=settings.sample_seconds,
                memory_bandwidth_peak=settings.memory_bandwidth_peak,
                pids_max=settings.pids_max,
                work_bytes_max=settings.work_bytes_max,
                disk_reserve_bytes=settings.disk_reserve_bytes,
                users=told.guarding.users,
                shared_identity=settings.shared_identity,
                hidden=secret_paths(settings, told.guarding, told.state_dir),
                share_machine=settings.share_machine,
            ),
            tell_ready,
        )
    finally:
        telemetry.shutdown()
