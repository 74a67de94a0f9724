"""`cotenant top`: nodes and running jobs with their current usage, from the latest samples."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, command_error, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import all_jobs, all_nodes
from cotenant.cli.outcome import note, sanitize, usage_error
from cotenant.cli.pages import pages
from cotenant.cli.render import Column, console, join_or_count, plain_lines, styled
from cotenant.codec.errors import from_error
from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import HOLDING
from cotenant.deferred import asyncio, grpc
from cotenant.v1.contention_service_pb2 import AttemptSample, ListSamplesRequest, NodeSample
from cotenant.v1.job_service_pb2 import JobFilter

if TYPE_CHECKING:
    from cotenant.v1.contention_service_pb2_grpc import ContentionServiceAsyncStub

INTERVAL_DEFAULT = "2s"
INTERVAL_SECONDS_MIN = 0.2
NODES_NAMED_MAX = 2
UNKNOWN = "-"

NODE_COLUMNS = (
    Column("NODE"),
    Column("STATE", styled=True),
    Column("GPUS", right=True),
    Column("CORES", right=True),
    Column("BUSY", right=True),
    Column("CPU%", right=True),
    Column("STALL%", right=True),
    Column("MEMORY", right=True),
    Column("JOBS", right=True),
)
JOB_COLUMNS = (
    Column("JOB"),
    Column("NAME", elastic=True),
    Column("GPUS", right=True),
    Column("GPU%", right=True),
    Column("CORES", right=True),
    Column("BUSY", right=True),
    Column("RATE", right=True),
    Column("RUN", right=True),
    Column("NODES", elastic=True),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Nodes and jobs with their usage."""

    nodes: list[views.View]
    jobs: list[views.View]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top")(top)


def top(
    context: typer.Context,
    interval: Annotated[str, typer.Option(metavar="DURATION", help="Refresh interval.")] = INTERVAL_DEFAULT,
    once: Annotated[bool, typer.Option("--once", help="Print once; the default if stdout is not a terminal.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Watch nodes and running jobs: the cores they hold and the cores they keep busy.

    \b
    Examples:
      cotenant top
      cotenant top --once --json
    """
    pause_seconds = _interval(interval)
    flags = Flags.of(context)
    if sys.stdout.isatty() and not once and not as_json:
        with suppress(KeyboardInterrupt):  # Ctrl-C ends watching
            with_mesh(flags, lambda mesh: _live(mesh, pause_seconds))
        return
    usage_view = with_mesh(flags, read_usage)
    if as_json:
        views.print_json({"nodes": usage_view.nodes, "jobs": usage_view.jobs})
        return
    print("\n".join(plain_lines(NODE_COLUMNS, _cleaned(map(_node_row, usage_view.nodes)))))
    print()
    print("\n".join(plain_lines(JOB_COLUMNS, _cleaned(map(_job_row, usage_view.jobs)))))


def _interval(text: str) -> float:
    try:
        seconds = units.parse_seconds(text)
    except ValueError as error:
        raise usage_error(f"--interval {error}") from None
    return max(seconds, INTERVAL_SECONDS_MIN)


async def read_usage(mesh: Mesh) -> Usage:
    """Return all nodes, the jobs that hold resources, and their usage from each node's latest sample."""
    wanted = JobFilter(phases=[PHASES.to_wire(phase) for phase in sorted(HOLDING)])
    nodes = [node async for node in all_nodes(mesh)]
    jobs = [job async for job in all_jobs(mesh, wanted)]
    samples = {sample.node_id: sample for sample in await _samples(mesh)}
    now = time.time()
    return Usage(
        [{**views.node_view(node, now), **_node_use(samples.get(node.id))} for node in nodes],
        [{**views.job_view(job, now), **_job_use(job.id, samples.values())} for job in jobs],
    )


async def _samples(mesh: Mesh) -> list[NodeSample]:
    """Return the latest samples; none, with a note, if the contention service is unreachable."""
    try:
        return await mesh.call_contention_replicas(_listed)
    except grpc.aio.AioRpcError as error:
        if not is_unreachable(error.code()) and error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        note(f"no samples: {command_error(from_error(error)).message}")
        return []


async def _listed(contention: ContentionServiceAsyncStub) -> Sequence[NodeSample]:
    return [sample async for page in pages(contention.ListSamples, ListSamplesRequest()) for sample in page.samples]


def _node_use(sample: NodeSample | None) -> dict[str, Any]:
    if sample is None:
        return {"cores_busy": None, "cpu_percent": None, "cpu_stall_percent": None, "memory_busy_bytes": None}
    return {
        "cores_busy": sum(attempt.cores_used for attempt in sample.attempts),
        "cpu_percent": sample.cpu_percent,
        "cpu_stall_percent": sample.cpu.some_avg10,
        "memory_busy_bytes": sample.memory_used_bytes,
    }


def _job_use(job_id: str, samples: Iterable[NodeSample]) -> dict[str, Any]:
    """Return a job's usage, summed over its nodes."""
    parts = [attempt for sample in samples for attempt in sample.attempts if attempt.job_id == job_id]
    known = [part.gpu_utilisation_percent for part in parts if part.gpu_utilisation_percent >= 0]
    return {
        "cores_busy": sum(part.cores_used for part in parts) if parts else None,
        "gpu_percent": sum(known) / len(known) if known else None,
        "rate_per_second": _rate(parts),
    }


def _rate(parts: list[AttemptSample]) -> float | None:
    """Return the rate of the slowest part: a gang steps together."""
    rates = [part.rate_per_second for part in parts if part.rate_per_second > 0]
    return min(rates) if rates else None


async def _live(mesh: Mesh, pause_seconds: float) -> None:
    """Refresh the display; while the mesh is unreachable, keep the last data."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    out = console()
    with Live(console=out, auto_refresh=False, screen=True) as live:
        tables: list[Any] = []
        while True:
            try:
                usage_view = await read_usage(mesh)
                nodes = styled(NODE_COLUMNS, _cleaned(map(_node_row, usage_view.nodes)), out.width)
                jobs = styled(JOB_COLUMNS, _cleaned(map(_job_row, usage_view.jobs)), out.width)
                tables, status = [nodes, Text(), jobs], f"{time.strftime('%H:%M:%S')}  Ctrl-C to quit"
            except grpc.aio.AioRpcError as error:
                if not is_unreachable(error.code()):
                    raise
                status = f"unreachable: {command_error(from_error(error)).message}"
            live.update(Group(Text(sanitize(status), style="dim"), Text(), *tables), refresh=True)
            await asyncio.sleep(pause_seconds)


def _cleaned(rows: Iterable[list[str]]) -> list[list[str]]:
    return [[sanitize(cell) for cell in row] for row in rows]


def _node_row(view: views.View) -> list[str]:
    busy = view["memory_busy_bytes"]
    return [
        view["id"],
        view["state"],
        f"{view['gpus_used']:g}/{view['gpus']}" if view["gpus"] else UNKNOWN,
        f"{view['cores_used']}/{view['cores']}",
        _number(view["cores_busy"]),
        _number(view["cpu_percent"], digits=0),
        _number(view["cpu_stall_percent"], digits=0),
        f"{UNKNOWN if busy is None else units.short_bytes(busy)}/{units.short_bytes(view['memory_bytes'])}",
        str(len(view["attempts"])),
    ]


def _job_row(view: views.View) -> list[str]:
    return [
        view["id"],
        view["name"],
        f"{view['gpus']:g}",
        _number(view["gpu_percent"], digits=0),
        units.write_cores(view["cores"]),
        _number(view["cores_busy"]),
        UNKNOWN if view["rate_per_second"] is None else f"{view['rate_per_second']:.3g}/s",
        units.short_seconds(view["run_seconds"]),
        join_or_count(view["nodes"], NODES_NAMED_MAX, "nodes"),
    ]


def _number(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"
