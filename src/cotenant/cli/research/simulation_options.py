"""What simulating commands share: options, interruption, progress bars and translation of errors."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.cli.profile_names import complete_profiles
from cotenant.cli.shared_options import with_options_of

if TYPE_CHECKING:  # numpy and the core are imported only to simulate
    from cotenant.cli.progress_bar import Bar
    from cotenant.simulator.comparison.summary import Comparison
    from cotenant.simulator.engine import Simulation
    from cotenant.simulator.scenario import Scenario

QUIET_SECONDS = 0.5  # shorter operations show no progress bar
OWN_PREDICTORS = ("oracle", "noisy-oracle", "none", "recorded")


def _named(group: str, *own: str) -> Callable[[str], list[str]]:
    """Return a completion function for the names of installed policies."""

    def offers(incomplete: str) -> list[str]:
        from importlib.metadata import entry_points

        names = {point.name for point in entry_points(group=f"cotenant.{group}")} | set(own)
        return sorted(name for name in names if name.startswith(incomplete))

    return offers


def complete_predictors(incomplete: str) -> list[str]:
    """Complete the last predictor of a list; the simulator's own predictors cannot be combined."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _named("predictors", *(() if comma else OWN_PREDICTORS))(last)]


def complete_arms(incomplete: str) -> list[str]:
    """Complete the last arm of a list."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in (*complete_profiles(last), *_named("queue_policies")(last))]


def _scenario(
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Trace, plain or gzipped; `sample` is bundled, with 260 jobs.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="NxG or NxGxC: nodes, GPUs and cores per node (default 3 per GPU); or a file."
        ),
    ] = None,
    from_snapshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start from a `cotenant snapshot`, by default with its policies."),
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="cotenant, gavel, itp, muri, openb, philly, snapshot, synergy or tiresias; default: detected.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Policies that work together, as `up --profile` runs them; `cotenant policies --profile` lists them.",
            autocompletion=complete_profiles,
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Queue policy: order of jobs.",
            autocompletion=_named("queue_policies"),
            show_default="fifo",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Placement policy: choice of nodes.",
            autocompletion=_named("placement_policies"),
            show_default="consolidate",
        ),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="CPU allocator: number of cores.",
            autocompletion=_named("cpu_allocators"),
            show_default="requested",
        ),
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="oracle, noisy-oracle, none, learning predictors, or recorded (estimates of the snapshot).",
            autocompletion=complete_predictors,
            show_default="oracle",
        ),
    ] = None,
    contention: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Contention policy, where --option simulator.speed=bandwidth lets jobs contend.",
            show_default="none",
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Tenants in YAML: quotas, limits and weights."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP.KEY=VALUE",
            help="Option of queue, placement, allocator, predictor or simulator; of one of several predictors:"
            " predictor.NAME.KEY=VALUE; repeatable.",
        ),
    ] = None,
    overlay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,…",
            help="Add what the trace lacks: models, cores, cpu-jobs, tenants, deadlines, … and a seed,"
            " such as models=synergy,cores=auto,seed=3; repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of randomized policies.")] = 0,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Skip unreadable rows and list them.")] = False,
    fair_share: Annotated[
        bool | None,
        typer.Option(
            "--fair-share/--no-fair-share",
            help="Whether tenants share the cluster fairly by weight.",
            show_default="as in the snapshot, else off",
        ),
    ] = None,
) -> Scenario:
    """Return a scenario from the options that all simulating commands share."""
    from cotenant.cli.mesh.tenant_file import load_tenants
    from cotenant.core.policy.profiles import find
    from cotenant.simulator.overlays import parse_overlays
    from cotenant.simulator.scenario import Scenario

    parse_overlays(overlay or ())  # report a typo before reading a long trace
    if from_snapshot is None and not (trace and cluster):
        raise usage_error("--trace and --cluster are required, or --from-snapshot")
    if from_snapshot is not None and (trace or cluster or format_name):
        raise usage_error("--from-snapshot cannot be combined with --trace, --cluster or --format")
    traced = Scenario(trace or "", cluster or "", format_name)
    base = traced if from_snapshot is None else Scenario.of_snapshot(from_snapshot)
    asked = {
        "queue": queue,
        "placement": placement,
        "allocator": allocator,
        "predictor": predictor,
        "contention": contention,
    }
    options = parse_options(option or ())
    if fair_share is not None:
        options.setdefault("simulator", {}).setdefault("fair_share", "tenants" if fair_share else "off")
    if profile is not None:
        base = base.choosing({}, {"simulator": options.get("simulator", {})}).under(find(profile))
    chosen = base.choosing({group: name for group, name in asked.items() if name}, options)
    return replace(
        chosen,
        skip_bad_rows=skip_bad_rows,
        tenants=chosen.tenants if tenants is None else load_tenants(tenants),
        seed=seed,
        overlay=",".join(overlay or ()),
    )


def parse_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return options by group and key.

    >>> parse_options(["queue.mode=backfill", "simulator.preemption_cost_seconds=30"])
    {'queue': {'mode': 'backfill'}, 'simulator': {'preemption_cost_seconds': '30'}}

    Raises:
        BadOption: an option does not have the form group.key=value.
    """
    from cotenant.core.model.validation import Violation
    from cotenant.core.policy.options import BadOption

    options: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        group, dot, key = name.strip().partition(".")
        if not (equals and dot and group and key):
            raise BadOption([Violation(text, "must be written group.key=value")], {"queue.mode": "strict"})
        options.setdefault(group, {})[key] = value
    return options


@contextmanager
def as_command_errors() -> Iterator[None]:
    """Translate errors of a simulation into command errors."""
    try:
        yield
    except Exception as error:
        from cotenant import simulator
        from cotenant.core.policy.options import BadOption
        from cotenant.core.policy.profiles import UnknownProfile
        from cotenant.plugins import UnknownPolicy
        from cotenant.simulator.comparison.arms import BadArm
        from cotenant.simulator.comparison.runner import ArmFailed
        from cotenant.simulator.recording.event_validation import BadRecording
        from cotenant.simulator.report.writing import BadReport

        asked = UnknownPolicy | UnknownProfile | BadOption | BadArm
        bad = asked | simulator.BadTrace | simulator.BadCluster | BadRecording | BadReport
        if isinstance(error, bad) or (isinstance(error, ArmFailed) and error.input_at_fault):
            raise usage_error(str(error)) from error
        if isinstance(error, simulator.PolicyFailed | ArmFailed):
            raise CommandError(str(error)) from error
        raise


def report_writer(report: Path | None, png: Path | None = None) -> Callable[[Comparison], None] | None:
    """Return a function that writes a report; missing requirements are reported before simulating."""
    if report is None and png is None:
        return None
    from cotenant.simulator.report.writing import writer

    return writer(report, png)


class Stop:
    """Whether the user asked to stop."""

    asked = False


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Make the first Ctrl-C end the simulation between two events, and the second end the program."""
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Watcher:
    """Watches a simulation: shows its progress and stops it if the user asks."""

    def __init__(self, stop: Stop, bar: Bar) -> None:
        self._stop, self._bar = stop, bar
        self._calls = 0

    def __call__(self, simulation: Simulation) -> bool:
        """Show the progress; return False to stop."""
        from cotenant.simulator.run import WATCH_SECONDS

        self._calls += 1
        if self._calls * WATCH_SECONDS >= QUIET_SECONDS:
            self._bar.show(simulation.finished, len(simulation.trace))
        return not self._stop.asked


class RowWatcher:
    """Watches a trace being read: shows the progress and stops if the user asks."""

    def __init__(self, stop: Stop, bar: Bar) -> None:
        self._stop, self._bar = stop, bar
        self._began = time.monotonic()

    def __call__(self, rows: int) -> None:
        """Show how many rows were read.

        Raises:
            KeyboardInterrupt: the user asked to stop; there are no results yet.
        """
        if self._stop.asked:
            raise KeyboardInterrupt
        if time.monotonic() - self._began >= QUIET_SECONDS:
            self._bar.show(rows, None)


with_scenario = with_options_of(_scenario, as_command_errors, unimported=("Scenario",))
