"""`cotenant plan`: what the scheduler would do with a snapshot now."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.profile_names import complete_profiles
from cotenant.cli.render import Column, print_table
from cotenant.cli.research.simulation_options import as_command_errors, parse_options
from cotenant.cli.units import short_seconds

if TYPE_CHECKING:  # numpy and the core are imported only to plan
    from cotenant.simulator.snapshot_plan import PlannedJob, PlannedStart, SnapshotPlan
    from cotenant.v1.advice_service_pb2 import PlannedJob as RemoteJob

SECONDS_DEFAULT, SECONDS_MAX = 30.0, 3_600.0
NODES_SHOWN_MAX = 3
STDIN = "-"
COLUMNS = (
    Column("#", right=True),
    Column("JOB"),
    Column("GPUS", right=True),
    Column("CORES", right=True),
    Column("START", right=True),
    Column("8 OF 10", right=True),
    Column("NODES / REASON", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    context: typer.Context,
    snapshot: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT", help="A file of `cotenant snapshot`; - reads it from standard input.")
    ],
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Policies of a profile instead of the snapshot's.", autocompletion=complete_profiles
        ),
    ] = "",
    queue: Annotated[str, typer.Option(metavar="NAME", help="Another queue policy.")] = "",
    placement: Annotated[str, typer.Option(metavar="NAME", help="Another placement policy.")] = "",
    allocator: Annotated[str, typer.Option(metavar="NAME", help="Another CPU allocator.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(metavar="GROUP.KEY=VALUE", help="Policy option; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")] = 0,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Time for the forecast of starts.")
    ] = SECONDS_DEFAULT,
    remote: Annotated[
        bool, typer.Option("--remote", help="Let the mesh plan it (PlanJobs), with the policies installed there.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show what the scheduler would do with the jobs of a snapshot now; starts nothing, and needs no mesh.

    Each waiting job has its place in the order, and the nodes, GPUs and cores that it would get, or why not; and when
    it would start, with the range that holds in 8 of 10 cases.

    \b
    Examples:
      cotenant plan snapshot-20260102-030405.json
      cotenant plan cluster.json --profile paper:genie
      cotenant --endpoint head:7072 plan - --remote --json < cluster.json
      cotenant plan cluster.json --queue srsf --option simulator.preemption=priority --json
    """
    if not 0 <= seconds <= SECONDS_MAX:
        raise usage_error(f"--seconds: must be from 0 to {SECONDS_MAX:g}, not {seconds:g}")
    named = {"queue": queue, "placement": placement, "allocator": allocator}
    chosen = {group: name for group, name in named.items() if name}
    if remote:
        _remote(context, _document(snapshot), Asked(profile, chosen, tuple(option or ()), seed, seconds), as_json)
        return
    with as_command_errors():
        from cotenant.simulator import snapshots
        from cotenant.simulator.plan_view import plan_view
        from cotenant.simulator.snapshot_plan import Choices, plan_snapshot

        taken = snapshots.parse(_document(snapshot), "standard input" if str(snapshot) == STDIN else str(snapshot))
        until = time.monotonic() + seconds
        made = plan_snapshot(
            taken,
            Choices(profile, chosen, parse_options(option or ())),
            seed=seed,
            spent=lambda: time.monotonic() > until,
        )
    if as_json:
        print(json.dumps(plan_view(made), indent=2, ensure_ascii=False))
        return
    print_table(COLUMNS, [_row(job) for job in made.jobs], nothing="no job waits")
    for line in (*_stops(made), *made.notes):
        note(line)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a mesh is asked besides the snapshot."""

    profile: str
    policies: dict[str, str]
    options: tuple[str, ...]
    seed: int
    seconds: float


def _document(path: Path) -> bytes:
    """Return the bytes of a file, or of standard input for `-`.

    Raises:
        CommandError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
    except OSError as error:
        raise usage_error(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def _remote(context: typer.Context, document: bytes, asked: Asked, as_json: bool) -> None:
    """Send a snapshot to the mesh and print the plan that it returns."""
    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.json_format import MessageToDict

    from cotenant.cli.connection import Mesh, with_mesh
    from cotenant.v1.advice_service_pb2 import PlanJobsRequest, PlanJobsResponse

    pairs = dict(pair.partition("=")[::2] for pair in asked.options)
    request = PlanJobsRequest(
        snapshot=document, profile=asked.profile, policies=asked.policies, options=pairs, seed=asked.seed
    )
    request.budget.CopyFrom(Duration(nanos=0, seconds=int(asked.seconds)))

    async def work(mesh: Mesh) -> PlanJobsResponse:
        answer: PlanJobsResponse = await mesh.advice.PlanJobs(request)
        return answer

    answer = with_mesh(Flags.of(context), work)
    if as_json:
        view = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=False)
        print(json.dumps(view, indent=2, ensure_ascii=False))
        return
    print_table(COLUMNS, [_remote_row(job) for job in answer.jobs], nothing="no job waits")
    for stop in answer.stops:
        note(f"{stop.job_id} is {stop.kind} for {', '.join(stop.starts) or 'others'}")
    for line in answer.notes:
        note(line)


def _remote_row(job: RemoteJob) -> tuple[str, ...]:
    starts = not job.HasField("refusal")
    nodes = list(dict.fromkeys(place.node_id for place in job.places))
    more = f" and {len(nodes) - NODES_SHOWN_MAX} more" if len(nodes) > NODES_SHOWN_MAX else ""
    where = ", ".join(nodes[:NODES_SHOWN_MAX]) + more if starts else f"{job.refusal.code}: {job.refusal.detail}"
    gpus = sum(place.gpu_milli for place in job.places) / 1000
    held = (f"{gpus:g}", str(sum(place.cores for place in job.places))) if starts else ("", "")
    return (str(job.order or ""), job.job_id, *held, *_remote_start(job), where)


def _remote_start(job: RemoteJob) -> tuple[str, str]:
    if not job.HasField("start"):
        return "", ""
    start = job.start
    if start.of_unknown:
        return "unknown", ""
    if not start.HasField("start"):
        return "later", ""
    first, low, high = (at.ToTimedelta().total_seconds() for at in (start.start, start.start_p10, start.start_p90))
    return ("now", "") if not high else (_after(first), f"{_after(low)} … {_after(high)}")


def _row(job: PlannedJob) -> tuple[str, ...]:
    where = _nodes(job) if job.starts else f"{job.code}: {job.detail}"
    gpus = sum(place.gpu_milli for place in job.places) / 1000
    cores = sum(place.cores for place in job.places)
    held = (f"{gpus:g}", str(cores)) if job.starts else ("", "")
    return (str(job.order or ""), job.id, *held, *_start(job.start), where)


def _nodes(job: PlannedJob) -> str:
    nodes = list(dict.fromkeys(place.node for place in job.places))
    more = f" and {len(nodes) - NODES_SHOWN_MAX} more" if len(nodes) > NODES_SHOWN_MAX else ""
    return ", ".join(nodes[:NODES_SHOWN_MAX]) + more


def _start(start: PlannedStart | None) -> tuple[str, str]:
    if start is None:
        return "", ""
    if start.of_unknown:
        return "unknown", ""
    if not start.p90_seconds:
        return "now", ""
    return _after(start.seconds), f"{_after(start.p10_seconds)} … {_after(start.p90_seconds)}"


def _after(seconds: float) -> str:
    return "later" if seconds == float("inf") else short_seconds(seconds)


def _stops(made: SnapshotPlan) -> Iterator[str]:
    for stop in made.stops:
        where = f" to {', '.join(place.node for place in stop.places)}" if stop.places else ""
        yield f"{stop.id} is {stop.kind}{where} for {', '.join(stop.starts) or 'others'}"
