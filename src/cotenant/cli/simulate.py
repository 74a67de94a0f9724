"""`cotenant simulate`: replay a trace on a cluster that exists only here."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.outcome import CommandError, ExitCode, note, usage
from cotenant.cli.render import print_card
from cotenant.cli.units import short_seconds

if TYPE_CHECKING:  # numpy and the core load only when something is simulated
    from rich.progress import Progress

    from cotenant.simulator import Result
    from cotenant.simulator.engine import Simulation

SKIPPED_SHOWN_MAX = 10
QUIET_SECONDS = 0.5  # simulations shorter than this show no progress


def simulate(
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Trace, plain or gzipped; `sample` is a bundled one of 260 jobs.")
    ],
    cluster: Annotated[
        str, typer.Option(metavar="SIZE", help="NxG or NxGxC: nodes, GPUs and cores of each (3 a GPU); or a file.")
    ],
    format_name: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="itp, philly or tiresias; left out, the header tells."),
    ] = None,
    queue: Annotated[str, typer.Option(metavar="NAME", help="Queue policy: who runs first.")] = "fifo",
    placement: Annotated[str, typer.Option(metavar="NAME", help="Placement policy: where.")] = "consolidate",
    allocator: Annotated[str, typer.Option(metavar="NAME", help="CPU allocator: on how many cores.")] = "requested",
    predictor: Annotated[
        str,
        typer.Option(metavar="NAME", help="Known in advance: oracle, noisy-oracle, none, or a predictor that learns."),
    ] = "oracle",
    contention: Annotated[str, typer.Option(metavar="NAME", help="Contention policy; only none yet.")] = "none",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP.KEY=VALUE", help="Of queue, placement, allocator, predictor or simulator; repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of what chance the policies use.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; `about` in it explains it.")] = False,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out rows that cannot be read, and list them.")
    ] = False,
) -> None:
    """Replay a trace through the scheduler and tell how long jobs took.

    The policies and the scheduling cycle are those of the live mesh; only the clock is simulated.

    \b
    Examples:
      cotenant simulate --trace sample --cluster 2x8
      cotenant simulate --trace jobs.csv.gz --cluster 6x8 --queue las --json
      cotenant simulate --trace sample --cluster 2x8 --option queue.mode=backfill
    """
    from cotenant import simulator
    from cotenant.core.options import BadOption
    from cotenant.plugins import UnknownPolicy

    try:
        with _stop_on_interrupt() as stop, _Progress(stop) as progress:
            result = simulator.simulate(
                trace,
                cluster,
                queue=queue,
                placement=placement,
                allocator=allocator,
                predictor=predictor,
                contention=contention,
                options=parse_options(option or ()),
                seed=seed,
                format_name=format_name,
                skip_bad_rows=skip_bad_rows,
                watch=progress.watch,
            )
    except (simulator.BadTrace, simulator.BadCluster, UnknownPolicy, BadOption) as error:
        raise usage(str(error)) from error
    except simulator.PolicyFailed as error:
        raise CommandError(str(error)) from error
    _tell(result)
    if as_json:
        print(json.dumps(result.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_card(_card(result))
    if not result.complete:
        raise typer.Exit(ExitCode.INTERRUPTED)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("simulate")(simulate)


def parse_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read options by group and name.

    >>> parse_options(["queue.mode=backfill", "simulator.preemption_cost_seconds=30"])
    {'queue': {'mode': 'backfill'}, 'simulator': {'preemption_cost_seconds': '30'}}

    Raises:
        BadOption: one is not written as group.key=value.
    """
    from cotenant.core.options import BadOption
    from cotenant.core.validate import Violation

    options: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        group, dot, key = name.strip().partition(".")
        if not (equals and dot and group and key):
            raise BadOption([Violation(text, "must be written group.key=value")], {"queue.mode": "strict"})
        options.setdefault(group, {})[key] = value
    return options


class _Stop:
    """Whether the user wants no more."""

    asked = False


@contextmanager
def _stop_on_interrupt() -> Iterator[_Stop]:
    """Let a first Ctrl-C end the simulation between two events; a second one ends the program."""
    stop = _Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class _Progress:
    """A bar on stderr, for simulations that take a while, where somebody watches."""

    def __init__(self, stop: _Stop) -> None:
        self._stop = stop
        self._bar: Progress | None = None
        self._calls = 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def watch(self, simulation: Simulation) -> bool:
        """Show how far it is; False ends it."""
        from cotenant.simulator.run import WATCH_SECONDS

        self._calls += 1
        if self._calls * WATCH_SECONDS >= QUIET_SECONDS and sys.stderr.isatty():
            self._show(simulation)
        return not self._stop.asked

    def _show(self, simulation: Simulation) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task("jobs finished", total=len(simulation.trace))
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=simulation.finished)


def _tell(result: Result) -> None:
    """Say on stderr what a user should know beside the figures."""
    for told in result.notes:
        note(f"note: {told}")
    for row in result.skipped_rows[:SKIPPED_SHOWN_MAX]:
        note(f"skipped: {row}")
    if more := result.skipped_rows[SKIPPED_SHOWN_MAX:]:
        note(f"skipped: {len(more)} more rows, which --json lists")
    if not result.complete:
        note(
            f"stopped after {short_seconds(result.simulated_seconds)} of simulated time: "
            f"{result.finished} of {result.jobs} jobs submitted by then had finished"
        )


def _card(result: Result) -> Iterator[tuple[str, str]]:
    yield "trace", f"{result.trace} ({result.format})"
    yield "cluster", result.cluster
    yield "policies", ", ".join(result.policies[group] for group in ("queue", "placement", "allocator", "predictor"))
    yield "jobs finished", f"{result.finished:,} of {result.jobs:,}"
    yield "average JCT", _seconds(result.avg_jct_seconds)
    yield "median JCT", _seconds(result.median_jct_seconds)
    yield "95 % JCT", _seconds(result.p95_jct_seconds)
    yield "99 % JCT", _seconds(result.p99_jct_seconds)
    yield "makespan", _seconds(result.makespan_seconds)
    yield "average queueing", _seconds(result.avg_queue_seconds)
    yield "preemptions", f"{result.preemptions:,}"
    yield "GPU time held", _percent(result.gpu_utilisation)
    yield "core time held", _percent(result.cpu_utilisation)
    for kind, seconds in result.waits_seconds.items():
        if seconds:
            yield (
                f"waits for {kind.replace('_', ' ')}",
                f"{short_seconds(seconds)}, most of all for {result.waits[kind]:,} jobs",
            )
    for reason, count in Counter(refusal.detail for _, refusal in result.unschedulable).items():
        yield "unschedulable", f"{count:,} jobs: {reason}"
    yield "simulated in", f"{result.wall_seconds:.2f} s"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:,.1f} s ({short_seconds(seconds)})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
