"""`cotenant plan`: what the scheduler would do with a snapshot now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.profile_names import complete_profiles
from cotenant.cli.render import Column, print_table
from cotenant.cli.research.simulation_options import as_command_errors, parse_options
from cotenant.cli.units import short_seconds

if TYPE_CHECKING:  # numpy and the core are imported only to plan
    from cotenant.simulator.snapshot_plan import PlannedJob, PlannedStart, SnapshotPlan

SECONDS_DEFAULT, SECONDS_MAX = 30.0, 3_600.0
NODES_SHOWN_MAX = 3
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
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="A file of `cotenant snapshot`.")],
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
    as_json: options.AsJson = False,
) -> None:
    """Show what the scheduler would do with the jobs of a snapshot now; starts nothing, and needs no mesh.

    Each waiting job has its place in the order, and the nodes, GPUs and cores that it would get, or why not; and when
    it would start, with the range that holds in 8 of 10 cases.

    \b
    Examples:
      cotenant plan snapshot-20260102-030405.json
      cotenant plan cluster.json --profile paper:genie
      cotenant plan cluster.json --queue srsf --option simulator.preemption=priority --json
    """
    if not 0 <= seconds <= SECONDS_MAX:
        raise usage_error(f"--seconds: must be from 0 to {SECONDS_MAX:g}, not {seconds:g}")
    with as_command_errors():
        from cotenant.simulator import snapshots
        from cotenant.simulator.plan_view import plan_view
        from cotenant.simulator.snapshot_plan import Choices, plan_snapshot

        named = {"queue": queue, "placement": placement, "allocator": allocator}
        chosen = {group: name for group, name in named.items() if name}
        taken = snapshots.read(snapshot)
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
