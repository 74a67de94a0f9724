"""`cotenant demo`: the whole mesh, a real mixed workload, a summary and a report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from cotenant.cli.annotations import typer
from cotenant.cli.missing_extras import check_extras
from cotenant.cli.outcome import CommandError
from cotenant.cli.render import Column, console, print_table, styled
from cotenant.cli.units import short_seconds
from cotenant.core.model.refusal import Code

if TYPE_CHECKING:  # grpc and the services are imported only when the mesh starts
    from rich.text import Text

    from cotenant.cli.mesh.demo_report import Bar, Line
    from cotenant.cli.mesh.demo_workload import DemoJob
    from cotenant.cli.mesh.embedded import EmbeddedMesh
    from cotenant.v1.job_pb2 import Job
    from cotenant.v1.job_service_pb2_grpc import JobServiceAsyncStub

GPUS = 4
SECONDS_DEFAULT, SECONDS_MIN = 20.0, 10.0
REFRESH_SECONDS = 0.25
TIMEOUT_FACTOR = 3.0  # a slow machine may take this multiple of the planned time
REFUSED, NOT_YET = "refused", "…"
RUNS = ("starting", "running")
COLUMNS = (
    Column("JOB"),
    Column("RESULT", styled=True),
    Column("GPUS", right=True),
    Column("CORES", right=True),
    Column("WAITED", right=True),
    Column("RAN", right=True),
    Column("STEPS/S", right=True),
    Column("CORES / REASON", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    seconds: Annotated[
        float, typer.Option(min=SECONDS_MIN, help="Approximate length of the workload on two cores.")
    ] = SECONDS_DEFAULT,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML report; default: ~/.cache/cotenant/demo.html.")
    ] = None,
) -> None:
    """Run the whole mesh on this machine with a real mixed workload and write a report.

    The processes, their cores and cgroups are real. The GPUs are declared: none is needed. At the end, the same
    scheduler replays a bundled public trace under a simulated clock.

    \b
    Examples:
      cotenant demo
      cotenant demo --seconds 40 --report demo.html
    """
    check_extras("cotenant demo", "agent", "server")
    asyncio.run(_demo(seconds, report))


@dataclass(slots=True)
class DemoState:
    """The demo's jobs and their latest states."""

    jobs: Sequence[DemoJob]
    began: float = field(default_factory=time.time)
    ids: dict[str, str] = field(default_factory=dict)  # by name
    latest: dict[str, Job] = field(default_factory=dict)  # by id
    refused: dict[str, str] = field(default_factory=dict)  # by name


async def _demo(seconds: float, report: Path | None) -> None:
    from cotenant import telemetry
    from cotenant.cli.mesh.demo_workload import workload
    from cotenant.cli.mesh.settings import Settings
    from cotenant.cli.mesh.up import mesh_config, running_mesh, start_agents

    os.environ.setdefault("COTENANT_LOG", "error")  # its node disconnecting at the end is expected
    telemetry.setup("cli")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cotenant-demo-") as directory:
        settings = Settings(gpus=f"fake:{GPUS}", share_machine=True)
        agents = start_agents(settings)
        async with running_mesh(mesh_config(settings, Path(directory), {}), agents) as mesh:
            (node,) = await mesh.nodes_ready()
            cores = len(node.inventory.cores)
            machine = f"{node.id}: {cores} cores, {GPUS} declared GPUs (no GPU is needed or used)"
            _print(f"The mesh is up after {time.monotonic() - begun:.1f} s on {machine}.")
            for sentence in node.inventory.not_enforced:
                _print(f"Not enforced here: {sentence}")
            state = DemoState(workload(GPUS, cores, (seconds - 2) / 18))
            _print(f"{len(state.jobs)} jobs submitted: training, a gang, CPU jobs, one too big, one with a typo.\n")
            try:
                await asyncio.wait_for(_run(mesh, state), seconds * TIMEOUT_FACTOR)
            except TimeoutError:
                raise CommandError(f"the workload did not end within {seconds * TIMEOUT_FACTOR:.0f} s") from None
            finally:
                await _cancel_all(mesh, state)
    lines = [_line(state, job) for job in state.jobs]
    print_table(COLUMNS, [_cells(line) for line in lines])
    replay = _replay()
    written = _write(report, lines, _bars(state), replay, machine)
    _print(f"\nReport with a chart of cores over time: {written}")
    _print("\nNext:  cotenant up --gpus fake:4            start the mesh")
    _print("       cotenant submit --gpus 1 --wait -- python3 -c 'print(42)'")
    _print("       cotenant --help                      everything else")


def _print(text: str) -> None:
    print(text, flush=True)


def _stub(mesh: EmbeddedMesh) -> JobServiceAsyncStub:
    from cotenant.v1.job_service_pb2_grpc import JobServiceStub

    return cast("JobServiceAsyncStub", JobServiceStub(mesh.channel))


async def _run(mesh: EmbeddedMesh, state: DemoState) -> None:
    """Submit all jobs and show them until the last one has ended."""
    import grpc.aio

    from cotenant.codec import specs
    from cotenant.codec.errors import from_error
    from cotenant.v1 import job_service_pb2 as pb

    stub = _stub(mesh)
    for job in state.jobs:
        try:
            answer = await stub.CreateJob(pb.CreateJobRequest(spec=specs.spec_to_wire(job.spec)))
            state.ids[job.spec.name], state.latest[answer.job.id] = answer.job.id, answer.job
        except grpc.aio.AioRpcError as error:
            problem = from_error(error)
            state.refused[job.spec.name] = f"{problem.reason}: {problem.message}"
    watch = stub.WatchJobs(pb.WatchJobsRequest(until_ended=True))
    showing = asyncio.create_task(_show(state))
    try:
        async for change in watch:
            state.latest |= {job.id: job for job in change.jobs}
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing


async def _show(state: DemoState) -> None:
    """Show a live table on a terminal; elsewhere print only changes."""
    if not sys.stdout.isatty():
        printed: dict[str, str] = {}
        while True:
            for job in state.jobs:
                line = _line(state, job)
                if printed.get(line.job) != line.phase and line.where != NOT_YET:
                    printed[line.job] = line.phase
                    _print(f"{time.time() - state.began:5.1f} s  {line.job:<12} {line.phase:<10} {line.where}")
            await asyncio.sleep(REFRESH_SECONDS)
    from rich.live import Live

    screen = console()
    with Live(console=screen, refresh_per_second=1 / REFRESH_SECONDS, transient=True) as live:
        while True:
            live.update(_screen(state, screen.width))
            await asyncio.sleep(REFRESH_SECONDS)


def _screen(state: DemoState, width: int) -> Text:
    return styled(COLUMNS, [_cells(_line(state, job)) for job in state.jobs], width)


async def _cancel_all(mesh: EmbeddedMesh, state: DemoState) -> None:
    """Cancel all jobs and wait for their ends."""
    import grpc.aio

    from cotenant.v1 import job_service_pb2 as pb

    stub = _stub(mesh)
    with contextlib.suppress(grpc.aio.AioRpcError):
        for job_id in state.ids.values():
            await stub.CancelJob(pb.CancelJobRequest(id=job_id))
        async with asyncio.timeout(5):
            async for _ in stub.WatchJobs(pb.WatchJobsRequest(until_ended=True)):
                pass


def _line(state: DemoState, job: DemoJob) -> Line:
    from cotenant.cli import views
    from cotenant.cli.mesh.demo_report import Line
    from cotenant.codec import specs

    name, now = job.spec.name, time.time()
    gpus = f"{job.spec.gpu_milli / 1000:g}"
    if name in state.refused:
        return Line(name, job.shows, REFUSED, gpus, "", "", "", "", state.refused[name])
    known = state.latest.get(state.ids.get(name, ""))
    if known is None:
        return Line(name, job.shows, "", gpus, "", "", "", "", "")
    phase = specs.PHASES.from_wire(known.phase).value
    nodes = ", ".join(part.node_id for part in known.attempt.allocations)
    tasks = [task for part in known.attempt.allocations for task in part.tasks]
    where = f"{nodes}, cores {','.join(str(cpu) for task in tasks for cpu in task.cpu_ids)}" if tasks else ""
    refused = known.refusal
    waits = "" if tasks and phase in RUNS else known.phase_reason  # of a job that runs, it tells why it waited before
    why = waits or (NOT_YET if refused.code == Code.NOT_YET_CONSIDERED else refused.detail)
    ran = views.run_seconds(known, now)
    rate = known.progress.step / ran if known.progress.step and ran > 0 else 0.0
    return Line(
        job=name,
        shows=job.shows,
        phase=phase,
        gpus=gpus,
        cores=f"{views.allocated_cores(known.attempt)}" if tasks else "",
        wait=short_seconds(views.wait_seconds(known, now)),
        run=short_seconds(ran) if ran else "",
        rate=f"{rate:.1f}" if rate else "",
        where=_with_names(why, state.ids) or where,
    )


def _with_names(why: str, ids: Mapping[str, str]) -> str:
    """Return a reason with the names of the demo's jobs in place of their ids.

    >>> _with_names("made room for 0tnk (logs), behind 0tnm", {"logs": "0tnk", "gang": "0tnm"})
    'made room for logs, behind gang'
    """
    for name, job_id in ids.items():
        why = why.replace(f"{job_id} ({name})", name).replace(job_id, name)
    return why


def _cells(line: Line) -> list[str]:
    return [line.job, line.phase, line.gpus, line.cores, line.wait, line.run, line.rate, line.where]


def _bars(state: DemoState) -> list[Bar]:
    from cotenant.cli.mesh.demo_report import Bar
    from cotenant.codec.specs import seconds

    bars = []
    for job in state.latest.values():
        attempt = job.attempt
        if not attempt.HasField("start_time"):
            continue
        begin, end = seconds(attempt.start_time) - state.began, seconds(attempt.end_time) - state.began
        for task in (task for part in attempt.allocations for task in part.tasks):
            lanes = [f"core {cpu}" for cpu in task.cpu_ids] + [f"GPU {share.uuid[-1]}" for share in task.gpus]
            bars += [Bar(lane, job.spec.name, begin, end) for lane in lanes]
    return bars


def _replay() -> list[tuple[str, str, str, str]]:
    from cotenant.simulator import simulate

    _print("\nThe same scheduler replays a public trace (ITP, 260 jobs) on two simulated servers with 8 GPUs each:")
    rows = []
    arms: Sequence[tuple[str, str, dict[str, str]]] = (
        ("fifo, strict", "fifo", {"mode": "strict"}),
        ("fifo, backfill", "fifo", {"mode": "backfill"}),
        ("las", "las", {}),
    )
    for title, name, options in arms:
        result = simulate("sample", "2x8", queue=name, placement="consolidate", options={"queue": options}).as_json()
        mean, median = (short_seconds(float(result[f"{what}_jct_seconds"])) for what in ("avg", "median"))
        rows.append((title, mean, median, str(result["preemptions"])))
    titles = (
        Column("QUEUE POLICY"),
        Column("AVERAGE JCT", right=True),
        Column("MEDIAN JCT", right=True),
        Column("PREEMPTIONS", right=True),
    )
    print_table(titles, rows)
    return rows


def _default_report() -> Path:
    """Return the default path of the report, in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cotenant" / "demo.html"


def _write(
    report: Path | None,
    lines: Sequence[Line],
    bars: Sequence[Bar],
    replay: Sequence[tuple[str, str, str, str]],
    machine: str,
) -> Path:
    from cotenant.cli.mesh.demo_report import page
    from cotenant.rpc.access import replace_file

    path = report or _default_report()
    try:
        path.parent.mkdir(mode=0o777 if report else 0o700, parents=True, exist_ok=True)
        text = page(lines, bars, replay, machine)
        if report:
            report.write_text(text)
        else:
            replace_file(path, text)
    except OSError as error:
        raise CommandError(f"cannot write the report to {path}: {error.strerror}") from None
    return path.absolute()
