"""`cotenant replay`: show the events of a recorded simulation, or repeat and compare it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cotenant.cli.annotations import options, typer
from cotenant.cli.outcome import CommandError, Exit, ExitCode, note, usage_error
from cotenant.cli.progress_bar import Bar
from cotenant.cli.render import Column, print_table
from cotenant.cli.research.simulation_options import Watcher, as_command_errors, stop_on_interrupt
from cotenant.cli.units import short_seconds
from cotenant.core.model.refusal import gpus, plural

if TYPE_CHECKING:  # numpy and the core are imported only when needed
    from cotenant.simulator.recording.event_file import Recording
    from cotenant.simulator.recording.replay import Difference, Verdict

COLUMNS = (Column("TIME", right=True), Column("EVENT"), Column("JOB", elastic=True), Column("DETAILS", elastic=True))
LINE_SHOWN_MAX = 2_000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recording written by `cotenant simulate --events`.")],
    check: Annotated[bool, typer.Option("--check", help="Repeat the simulation and compare every event.")] = False,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="Current path of the trace, for --check.")] = None,
    job: Annotated[str | None, typer.Option(metavar="ID", help="Only events of this job.")] = None,
    node: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only events on this node.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Only events of this kind; repeatable.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the events of a recorded simulation, or check that repeating it yields the same events.

    \b
    Examples:
      cotenant replay las.jsonl --job 42
      cotenant replay las.jsonl --kind preempted --json
      cotenant replay las.jsonl --check
    """
    with as_command_errors():
        from cotenant.simulator.recording.event_file import Recording
        from cotenant.simulator.recording.events import Kind

        if unknown := [each for each in kind or () if each not in set(Kind)]:
            raise usage_error(f"unknown event kind {unknown[0]!r}", hint=f"kinds are {', '.join(Kind)}")
        recording = Recording(file)
        if check:
            _check(recording, trace, as_json=as_json)
        else:
            _show(recording, _about(recording.events(), job, node, kind or ()), as_json=as_json)


def _check(recording: Recording, trace: str | None, *, as_json: bool) -> None:
    from cotenant.simulator.recording.replay import check

    with stop_on_interrupt() as stop, Bar("jobs finished") as bar:
        verdict = check(recording, trace=trace, watch=Watcher(stop, bar))
    if verdict.difference and verdict.versions:
        note(f"note: recorded with {', '.join(verdict.versions)}")
    if as_json:
        print(json.dumps(_verdict(verdict), indent=2, ensure_ascii=False))
    if verdict.interrupted:
        note(f"stopped after {verdict.events:,} identical events")
        raise Exit(ExitCode.INTERRUPTED)
    if verdict.difference:
        raise _differs(recording, verdict.difference)
    if not as_json:
        end = "" if verdict.complete else "; the recording is incomplete and was compared up to its end"
        print(f"identical: {verdict.events:,} events, byte for byte{end}")


def _verdict(verdict: Verdict) -> dict[str, Any]:
    differs = verdict.difference
    return {
        "same": differs is None and not verdict.interrupted,
        "events": verdict.events,
        "complete": verdict.complete,
        "difference": differs and {"line": differs.line, "recorded": differs.recorded, "repeated": differs.repeated},
        "versions": list(verdict.versions),
    }


def _differs(recording: Recording, difference: Difference) -> CommandError:
    at = "" if difference.at_seconds is None else f", at {difference.at_seconds:.3f} s"
    return CommandError(
        f"{recording.path}, line {difference.line}{at}: the repetition differs",
        details=(
            f"recorded: {_line(difference.recorded)}",
            f"repeated: {_line(difference.repeated)}",
        ),
        hint="the file was changed, or the policies differ from those of the recording",
    )


def _line(line: str | None) -> str:
    if line is None:
        return "end of events"
    return line if len(line) <= LINE_SHOWN_MAX else f"{line[:LINE_SHOWN_MAX]}…"


def _about(
    events: Iterable[dict[str, Any]], job: str | None, node: int | None, kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the events of a job, on a node and of the given kinds."""
    first: int | None = None
    shape: int | None = None
    waits, there = False, set[str]()
    for event in events:
        kind, job_id = event["kind"], event.get("job_id", "")
        here = node is None or _is_on_node(event, node, there)
        if job_id == job:
            first = event.get("shape") if kind == "submitted" else first
            shape = first if kind == "started" else event.get("shape", shape)
            waits = kind in ("submitted", "preempted", "reclaimed", "migrated", "rescaled", "attempt_failed") or (
                waits and kind not in ("started", "given_up")
            )
        mine = job in (None, job_id, *event.get("by", ()), *event.get("starts", ()), *event.get("stops", ()))
        mine |= waits and kind == "waiting" and not job_id and event.get("shape") == shape
        if mine and here and (not kinds or kind in kinds):
            yield event


def _is_on_node(event: Mapping[str, Any], node: int, there: set[str]) -> bool:
    """Return whether an event happened on a node; updates the jobs `there`."""
    kind, job_id = event["kind"], event.get("job_id", "")
    if kind == "started":
        there.discard(job_id)
        if any(place["node"] == node for place in event.get("nodes", ())):
            there.add(job_id)
        return job_id in there
    was_there = bool(job_id) and job_id in there
    if kind in ("preempted", "reclaimed", "migrated", "rescaled", "finished", "attempt_failed"):
        there.discard(job_id)
    return was_there or event.get("node") == node


def _show(recording: Recording, events: Iterator[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        separator = "["
        for event in events:
            print(f"{separator}\n{json.dumps(event, ensure_ascii=False)}", end="")
            separator = ","
        print("[]" if separator == "[" else "\n]")
    else:
        scenario = recording.header.get("scenario") or {}
        note(" ".join(f"{key} {scenario.get(key)}" for key in ("trace", "cluster", "queue", "placement", "seed")))
        print_table(COLUMNS, (_row(event) for event in events), nothing="no matching events")
    if recording.end is None or recording.end.get("complete") is not True:
        note("note: the recording is incomplete: the simulation was stopped")


def _row(event: Mapping[str, Any]) -> list[str]:
    whom = event.get("job_id") or (f"shape {event['shape']}" if "shape" in event else "")
    return [f"{event['at_seconds']:.3f}", event["kind"].replace("_", " "), whom, "; ".join(_details(event))]


def _details(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the details of an event as text."""
    places = event.get("nodes", ())
    if places:
        yield f"run {event['run']} on " + ", ".join(f"node {place['node']} ({_size(place)})" for place in places)
    elif "gpu_milli" in event:
        yield _size(event)
    if "work_seconds" in event:
        yield f"{short_seconds(event['work_seconds'])} of work"
    if event["kind"] == "planned":
        yield f"{len(event.get('starts', ()))} start, {len(event.get('stops', ()))} stop, {event['waiting']} waiting"
    if event.get("by"):
        yield f"makes room for {', '.join(event['by'])}"
    if "ran_seconds" in event:
        yield f"ran {short_seconds(event['ran_seconds'])}"
    if "queue_seconds" in event:
        yield f"waited {short_seconds(event['queue_seconds'])} in all"
    if "jct_seconds" in event:
        yield f"JCT {short_seconds(event['jct_seconds'])}"
    if "rate" in event:
        yield f"at {event['rate']:.1%} of reference speed"
    if "code" in event:
        yield f"{event['code']}: {event.get('detail', '')}"


def _size(of: Mapping[str, Any]) -> str:
    cores = of.get("cores")
    return gpus(of["gpu_milli"]) + (f", {plural(cores, 'core')}" if cores else "")
