"""`cotenant simulate`: replay a trace on a simulated cluster."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import Exit, ExitCode, note
from cotenant.cli.progress_bar import Bar
from cotenant.cli.render import print_card
from cotenant.cli.research.simulation_options import (
    RowWatcher,
    Watcher,
    report_writer,
    stop_on_interrupt,
    with_scenario,
)
from cotenant.cli.units import short_seconds

if TYPE_CHECKING:  # numpy and the core are imported only to simulate
    from cotenant.simulator import Result
    from cotenant.simulator.comparison.summary import Comparison
    from cotenant.simulator.comparison.time_series import Sampler
    from cotenant.simulator.recording.event_file import EventFile
    from cotenant.simulator.recording.events import Recorder
    from cotenant.simulator.scenario import Scenario

SKIPPED_SHOWN_MAX = 10
TENANTS_SHOWN_MAX = 10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(with_scenario(simulate))


def simulate(
    scenario: Scenario,
    events: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record all events in a .jsonl or .parquet file; see `cotenant replay`."),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; `about` in it explains it.")] = False,
) -> None:
    """Replay a trace through the scheduler and show job completion times.

    The policies and the scheduling cycle are those of the live mesh; only the clock and the cluster are simulated.

    \b
    Examples:
      cotenant simulate --trace sample --cluster 2x8
      cotenant simulate --trace jobs.csv.gz --cluster 6x8 --queue las --json
      cotenant simulate --trace sample --cluster 2x8 --option queue.mode=backfill
      cotenant simulate --trace sample --cluster 2x8 --queue las --events las.jsonl
    """
    write = report_writer(report)
    with stop_on_interrupt() as stop:
        with Bar("rows read") as bar:
            trace = scenario.read(watch=RowWatcher(stop, bar))
        sampler = _sampler(len(trace)) if write else None
        with Bar("jobs finished") as bar, _recorder(events, scenario) as file:
            result = scenario.run(watch=Watcher(stop, bar), recorder=_several(file, sampler), trace=trace)
            if file:
                file.end(complete=result.complete)
    _print_notes(result)
    if as_json:
        print(json.dumps(result.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_card(_card(result))
    if write and result.complete:
        _report(write, scenario, result, sampler)
    if not result.complete:
        raise Exit(ExitCode.INTERRUPTED)


def _recorder(path: Path | None, scenario: Scenario) -> AbstractContextManager[EventFile | None]:
    if path is None:
        return nullcontext()
    from cotenant.simulator.recording.event_file import writing

    return writing(path, scenario)


def _sampler(jobs: int) -> Sampler:
    from cotenant.simulator.comparison.runner import DRAWN_JOBS_MAX
    from cotenant.simulator.comparison.time_series import Sampler

    return Sampler(bars=jobs <= DRAWN_JOBS_MAX)


def _several(*listeners: Recorder | None) -> Recorder | None:
    """Return one recorder for all given ones; None without any."""
    there = tuple(listener for listener in listeners if listener)
    if not there:
        return None
    from cotenant.simulator.recording.events import MultiRecorder

    return MultiRecorder(there)


def _report(write: Callable[[Comparison], None], scenario: Scenario, result: Result, sampler: Sampler | None) -> None:
    from cotenant.simulator.comparison.runner import arm_run_of
    from cotenant.simulator.comparison.summary import comparison_of_one

    write(comparison_of_one(scenario, arm_run_of(result, sampler)))


def _print_notes(result: Result) -> None:
    """Print notes about the result on stderr."""
    for text in result.notes:
        note(f"note: {text}")
    for row in result.skipped_rows[:SKIPPED_SHOWN_MAX]:
        note(f"skipped: {row}")
    if more := result.skipped_rows[SKIPPED_SHOWN_MAX:]:
        note(f"skipped: {len(more)} more rows; list them with --json")
    if not result.complete:
        note(
            f"stopped after {short_seconds(result.simulated_seconds)} of simulated time: "
            f"{result.finished} of {result.jobs} jobs submitted by then had finished"
        )


def _card(result: Result) -> Iterator[tuple[str, str]]:
    yield "trace", f"{result.trace} ({result.format})"
    yield "overlay", ", ".join(f"{key} {value}" for key, value in result.overlay.items())
    yield "cluster", result.cluster
    yield "policies", ", ".join(result.policies[group] for group in ("queue", "placement", "allocator", "predictor"))
    yield "jobs finished", f"{result.finished:,} of {result.jobs:,}"
    if result.given_up:
        yield "jobs abandoned", f"{result.given_up:,}"
    yield "average JCT", _seconds(result.avg_jct_seconds)
    yield "median JCT", _seconds(result.median_jct_seconds)
    yield "P95 JCT", _seconds(result.p95_jct_seconds)
    yield "P99 JCT", _seconds(result.p99_jct_seconds)
    yield "makespan", _seconds(result.makespan_seconds)
    yield "average queueing", _seconds(result.avg_queue_seconds)
    yield "preemptions", f"{result.preemptions:,}"
    yield "GPU time held", _percent(result.gpu_occupancy)
    if result.gpu_utilisation != result.gpu_occupancy:
        yield "GPU utilization", _percent(result.gpu_utilisation)
    yield "core time held", _percent(result.cpu_utilisation)
    if result.sizing:
        given, lent = (result.sizing[name] or 0.0 for name in ("slimmed_cores", "lent_cores"))
        yield "cores given back, lent", f"{given:.1f}, {lent:.1f} on average"
    for kind, seconds in result.waits_seconds.items():
        if seconds:
            yield (
                f"waits for {kind.replace('_', ' ')}",
                f"{short_seconds(seconds)}, the longest wait of {result.waits[kind]:,} jobs",
            )
    if result.ends["killed"] or result.ends["failed"]:
        yield "outcomes", ", ".join(f"{count:,} {ended}" for ended, count in result.ends.items())
    if result.qos_guarantee_percent is not None:
        yield "deadlines met", f"{result.qos_guarantee_percent:.1f} %"
    yield from _tenants(result)
    for reason, count in Counter(refusal.detail for _, refusal in result.unschedulable).items():
        yield "unschedulable", f"{count:,} jobs: {reason}"
    yield "simulated in", f"{result.wall_seconds:.2f} s"


def _tenants(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the results of tenants, most GPU time first, if there are several."""
    most = sorted(result.tenants.items(), key=lambda each: (-(each[1]["gpu_seconds"] or 0.0), each[0]))
    for tenant, figures in most[:TENANTS_SHOWN_MAX] if len(most) > 1 else ():
        waited = figures["avg_queue_seconds"]
        text = f"{figures['jobs']:,} jobs, {_percent(figures['gpu_share']) or 'none'} of the GPU time held"
        yield f"tenant {tenant}", text + ("" if waited is None else f", {short_seconds(waited)} average queueing")
    if len(most) > TENANTS_SHOWN_MAX:
        yield "tenants", f"{len(most) - TENANTS_SHOWN_MAX} more; list them with --json"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.1f} s ({short_seconds(seconds)})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
