"""Simulations from Python: `cotenant.simulate`, `cotenant.compare` and traces, over the simulator of the commands."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from cotenant import extras
from cotenant.client.errors import BadField, CotenantError, InvalidArgument
from cotenant.client.plots import Plots

try:
    from cotenant.core.policy.profiles import find
    from cotenant.core.policy.protocols import ContentionPolicy, CpuAllocator, PlacementPolicy, Predictor, QueuePolicy
    from cotenant.simulator.comparison import summary
    from cotenant.simulator.comparison.arms import arms_of
    from cotenant.simulator.comparison.runner import arm_run_of
    from cotenant.simulator.comparison.time_series import Sampler
    from cotenant.simulator.results import Outcome, Result
    from cotenant.simulator.scenario import Scenario
    from cotenant.simulator.traces import Trace, load
except ModuleNotFoundError as error:
    if not (extra := extras.bringing(error.name or "", ["research"])):
        raise
    raise CotenantError(
        f"simulations need {error.name}", reason="MISSING_EXTRA", hint=extras.how_to_install(extra)
    ) from None

__all__ = ["Comparison", "Simulation", "Trace", "compare", "load_trace", "simulate"]

FRAMES = ("pandas", "polars")  # the first that is installed
SCALARS = (str, int, float, type(None))
SHOWN = ("finished", "avg_jct_seconds", "p95_jct_seconds", "avg_queue_seconds", "makespan_seconds", "gpu_utilisation")


class ScenarioFields(TypedDict, total=False):
    """The policies of a simulation and what else decides its result, as options of `cotenant simulate`.

    A policy is named, or is an object: one that is not installed, or has its options already.
    """

    queue: str | QueuePolicy
    placement: str | PlacementPolicy
    allocator: str | CpuAllocator
    predictor: str | Predictor
    contention: str | ContentionPolicy
    profile: str
    options: Mapping[str, object]  # by GROUP.KEY, such as {"queue.mode": "backfill"}
    overlay: str
    seed: int
    format: str
    skip_bad_rows: bool


@dataclass(frozen=True, slots=True, repr=False)
class Simulation(Plots):
    """The result of a simulation. `result` has each figure as an attribute; `cotenant.simulator` documents them."""

    result: Result
    _scenario: Scenario
    _sampler: Sampler

    @property
    def figures(self) -> dict[str, Any]:
        """All figures as plain values, as `cotenant simulate --json` prints them."""
        return self.result.as_json()

    def rows(self) -> list[dict[str, Any]]:
        """Return the outcome of each job as plain values."""
        return [dict(_values(outcome)) for outcome in self.result.outcomes]

    def to_frame(self) -> Any:
        """Return a data frame with a row for each job, of pandas or else polars."""
        return _frame(self.rows())

    def _compared(self) -> summary.Comparison:
        return summary.comparison_of_one(self._scenario, arm_run_of(self.result, self._sampler))

    def __repr__(self) -> str:
        policies = ", ".join(f"{group} {name}" for group, name in self.figures["policies"].items())
        return f"<Simulation of {self.result.jobs} jobs: {policies}>"

    def _repr_html_(self) -> str:
        return _html_table([{name: self.figures[name] for name in SHOWN}])


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Plots):
    """The result of a comparison of arms."""

    comparison: summary.Comparison

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The figures of each arm by name, averaged over its seeds."""
        labels = [arm.label for arm in self.comparison.runs.arms]
        return {
            label: {name: spread.mean for name, spread in self.comparison.figures(label).items()} for label in labels
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each arm as one row."""
        return [{"arm": label, **figures} for label, figures in self.figures.items()]

    def to_frame(self) -> Any:
        """Return a data frame with a row for each arm, of pandas or else polars."""
        return _frame(self.rows())

    def _compared(self) -> summary.Comparison:
        return self.comparison

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.figures)}>"

    def _repr_html_(self) -> str:
        return _html_table([{name: row.get(name) for name in ("arm", *SHOWN)} for row in self.rows()])


def load_trace(path: str | Path, format: str | None = None, *, skip_bad_rows: bool = False) -> Trace:
    """Return the jobs of a trace; `sample` is bundled.

    Raises:
        BadTrace: the file is no trace, or has unreadable rows.
    """
    return load(path, format, skip_bad_rows=skip_bad_rows)


def simulate(trace: str | Path | Trace, cluster: str, **fields: Unpack[ScenarioFields]) -> Simulation:
    """Replay a trace on a simulated cluster, such as 2x8: nodes and GPUs per node.

    >>> simulate("sample", "2x8", queue="las").result.finished
    260
    """
    scenario = _scenario(trace, cluster, fields)
    jobs = trace if isinstance(trace, Trace) else scenario.read()
    since = jobs.snapshot_state.now_seconds if jobs.snapshot_state else 0.0
    sampler = Sampler(bars=False, since_seconds=since)
    return Simulation(scenario.run(trace=jobs, recorder=sampler), scenario, sampler)


def compare(
    trace: str | Path,
    cluster: str,
    arms: Sequence[str | QueuePolicy],
    *,
    seeds: int = 1,
    **fields: Unpack[ScenarioFields],
) -> Comparison:
    """Run arms, which are profiles or queue policies, on the same trace and cluster, and compare them with the first.

    An arm may be a policy object, which need not be installed.

    >>> compare("sample", "2x8", ["fifo", "las"]).figures["fifo"]["finished"]
    260.0
    """
    wanted = arms_of(arms, (), _scenario(trace, cluster, fields))
    return Comparison(summary.compare(wanted, seeds=seeds, drawn=True))


def _scenario(trace: str | Path | Trace, cluster: str, fields: ScenarioFields) -> Scenario:
    unknown = [BadField(name, "unknown field") for name in fields if name not in ScenarioFields.__annotations__]
    options: dict[str, dict[str, str]] = {}
    for name, value in fields.get("options", {}).items():
        group, dot, key = name.partition(".")
        if not (group and dot and key):
            unknown.append(BadField(f"options[{name!r}]", "must be written group.key"))
        options.setdefault(group, {})[key] = str(value)
    if unknown:
        raise InvalidArgument("; ".join(map(str, unknown)), fields=tuple(unknown))
    given = cast("dict[str, Any]", fields)
    names = {
        name: given[name] for name in ("queue", "placement", "allocator", "predictor", "contention") if name in given
    }
    plain = {name: given[name] for name in ("overlay", "seed", "format", "skip_bad_rows") if name in given}
    source = trace.source if isinstance(trace, Trace) else str(trace)
    base = replace(Scenario(source, cluster), **plain)
    if profile := fields.get("profile"):
        base = base.choosing({}, {"simulator": options.get("simulator", {})}).under(find(profile))
    return base.choosing(cast("dict[str, str]", names), options)


def _values(outcome: Outcome) -> Iterator[tuple[str, Any]]:
    for name, value in outcome._asdict().items():
        if isinstance(value, SCALARS):
            yield name, value
    for name in ("jct_seconds", "queue_seconds", "gpu_seconds"):
        yield name, getattr(outcome, name)


def _frame(rows: list[dict[str, Any]]) -> Any:
    for name in FRAMES:
        try:
            library = import_module(name)
        except ImportError:
            continue
        return library.DataFrame(rows)
    raise CotenantError(
        "to_frame needs pandas or polars", reason="MISSING_LIBRARY", hint="pip install pandas; rows() needs neither"
    )


def _html_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the same keys as an HTML table.

    >>> _html_table([{"arm": "<a>", "jct": 1234.5}])[-66:]
    '<tbody><tr><td>&lt;a&gt;</td><td>1,234.5</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:,.1f}"
    return "" if value is None else str(value)
