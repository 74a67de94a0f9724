"""The page of a report: its texts beside the plots. The template escapes all external text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cotenant.plugins import POLICY_GROUPS
from cotenant.simulator.comparison.summary import Comparison, Spread
from cotenant.simulator.recording.event_file import digest_of, versions
from cotenant.simulator.report.components import parts
from cotenant.simulator.report.plots import Plot
from cotenant.simulator.report.style import ARMS

FIGURES: Sequence[tuple[str, str, str]] = (
    ("avg_jct_seconds", "average JCT", "h"),
    ("median_jct_seconds", "median", "h"),
    ("p95_jct_seconds", "95 %", "h"),
    ("p99_jct_seconds", "99 %", "h"),
    ("avg_queue_seconds", "average queueing", "h"),
    ("makespan_seconds", "makespan", "h"),
    ("preemptions", "preemptions", ""),
    ("gpu_utilisation", "GPU utilization", "%"),
    ("cpu_utilisation", "core utilization", "%"),
    ("cpu_jobs_avg_queue_seconds", "CPU jobs' queueing", "h"),
    ("finished", "jobs finished", ""),
)
FOUND = (("median_jct_seconds", "median"), ("p99_jct_seconds", "99 %"), ("avg_queue_seconds", "queueing"))
REASONS_MAX = 12
JOBS_NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of the table: its value, its spread over the seeds, and its ratio to the first arm's."""

    value: str
    spread: str = ""
    ratio: str = ""
    best: bool = False


def page(comparison: Comparison, plots: Sequence[tuple[Plot, str]]) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    first = comparison.runs.arms[0].scenario
    many = len(comparison.runs.arms) > 1
    return environment.get_template("page.html.j2").render(
        title=f"{len(comparison.runs.arms)} arms on {_file(first.trace)}"
        if many
        else f"{first.queue} on {_file(first.trace)}",
        many=many,
        verdict=verdict(comparison) if many else "",
        **parts(),
        trace=first.trace,
        cluster=first.cluster,
        known=_known(comparison),
        baseline=comparison.baseline,
        cards=list(_cards(comparison)),
        findings=list(_findings(comparison)) if many else [],
        columns=[(title, {"h": "hours", "%": "%"}.get(unit, "")) for name, title, unit in _figures_shown(comparison)],
        rows=list(_rows(comparison)),
        bounds=list(_bounds(comparison)),
        colours=[f"arm{number % len(ARMS)}" for number in range(len(comparison.runs.arms))],
        plots=[(plot, Markup(svg)) for plot, svg in plots],  # drawn by us; matplotlib escapes its texts
        assumptions=list(_assumptions(comparison)),
        arms=[(arm.label, list(_choices(arm.scenario.as_json()))) for arm in comparison.runs.arms],
        unschedulable=list(_unschedulable(comparison)),
        notes=comparison.notes,
        about=_about(comparison),
    )


def verdict(comparison: Comparison) -> str:
    """Return in a sentence which arm has the least average JCT; "" if no arm has one."""
    figures = {arm.label: comparison.figures(arm.label) for arm in comparison.runs.arms}
    means = {label: one["avg_jct_seconds"].mean for label, one in figures.items() if "avg_jct_seconds" in one}
    if not means:
        return ""
    best = min(means, key=lambda label: means[label])
    if best == comparison.baseline:
        return f"No arm has a smaller average JCT than {best}"
    ratio = _times(means[best] / means[comparison.baseline]) if means.get(comparison.baseline) else ""
    return f"{best} has the smallest average JCT{f': {ratio} that of {comparison.baseline}' if ratio else ''}"


def _known(comparison: Comparison) -> str:
    """Return what arms know in advance, without which no figure means much."""
    return ", ".join(dict.fromkeys(arm.scenario.predictor for arm in comparison.runs.arms))


def _file(path: str) -> str:
    return Path(path).name


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.3f}"


def _written(value: float, unit: str) -> str:
    return _hours(value) if unit == "h" else f"{value * 100:.1f}" if unit == "%" else f"{value:,.0f}"


def _times(ratio: float) -> str:
    """Return a ratio with two decimals, or two digits if it is small.

    >>> [_times(ratio) for ratio in (1.234, 0.98, 0.00123)]
    ['×1.23', '×0.98', '×0.0012']
    """
    return f"×{ratio:.2f}" if ratio >= 0.1 or not ratio else f"×{ratio:.2g}"


def _figures_shown(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the figures that are not 0 in every arm."""
    every = [comparison.figures(arm.label) for arm in comparison.runs.arms]
    return [each for each in FIGURES if any(each[0] in figures and any(figures[each[0]].per_seed) for figures in every)]


def _rows(comparison: Comparison) -> Iterator[tuple[str, int, list[Cell]]]:
    told = _figures_shown(comparison)
    every = {arm.label: comparison.figures(arm.label) for arm in comparison.runs.arms}
    least = {name: _least(every, name) for name, _, unit in told if unit == "h"}
    for label, figures in every.items():
        ratios = comparison.ratios(label) if label != comparison.baseline else {}
        cells = [
            _cell(figures.get(name), ratios.get(name), unit, best=least.get(name) == label) for name, _, unit in told
        ]
        yield label, len(comparison.runs.by_arm[label]), cells


def _least(every: Mapping[str, Mapping[str, Spread]], name: str) -> str | None:
    """Return the arm with the smallest value of a figure, if there is a single one."""
    means = {label: figures[name].mean for label, figures in every.items() if name in figures}
    best = min(means, key=lambda label: means[label], default=None)
    return best if best and sum(mean == means[best] for mean in means.values()) == 1 and len(means) > 1 else None


def _cell(figure: Spread | None, ratio: Spread | None, unit: str, *, best: bool) -> Cell:
    if figure is None:
        return Cell("–")
    spread = ""
    if len(figure.per_seed) > 1:
        spread = f"{_written(min(figure.per_seed), unit)} to {_written(max(figure.per_seed), unit)}"
    return Cell(
        _written(figure.mean, unit), spread, _times(ratio.mean) if ratio is not None and unit == "h" else "", best
    )


def _bounds(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    if bound := comparison.bound:
        base = bound.arms[comparison.baseline]
        for label, seconds in (
            ("srsf, all known, all GPUs in one server", bound.pooled_srsf_avg_jct_seconds),
            ("lower bound: no schedule is better", bound.avg_jct_seconds_min),
        ):
            yield label, _hours(seconds), _times(seconds / base) if base else ""


def _cards(comparison: Comparison) -> Iterator[tuple[str, str, str]]:
    """Yield what matters most: a large figure, what it is, and one more line."""
    means = {
        arm.label: comparison.figures(arm.label)["avg_jct_seconds"].mean
        for arm in comparison.runs.arms
        if "avg_jct_seconds" in comparison.figures(arm.label)
    }
    if not means:
        return
    best = min(means, key=lambda label: (means[label], label))
    base = means.get(comparison.baseline)
    if best != comparison.baseline and base:
        ratio = comparison.ratios(best)["avg_jct_seconds"]
        yield (
            _times(ratio.mean),
            f"average JCT of {best}",
            f"{_hours(means[best])} h; {comparison.baseline}: {_hours(base)} h",
        )
    else:
        yield f"{_hours(means[best])} h", f"average JCT of {best}", "the least" if len(means) > 1 else ""
    figures = comparison.figures(best)
    if "avg_queue_seconds" in figures:
        base_queue = comparison.figures(comparison.baseline).get("avg_queue_seconds")
        more = (
            f"{comparison.baseline}: {_hours(base_queue.mean)} h" if base_queue and best != comparison.baseline else ""
        )
        yield f"{_hours(figures['avg_queue_seconds'].mean)} h", f"average queueing of {best}", more
    if bound := comparison.bound:
        left = 1 - bound.avg_jct_seconds_min / bound.arms[best] if bound.arms[best] else 0.0
        yield (
            f"{left:.0%}",
            f"of {best}'s average JCT: the most that is left to gain",
            f"lower bound: {_hours(bound.avg_jct_seconds_min)} h",
        )
    if "gpu_utilisation" in figures:
        yield (
            f"{figures['gpu_utilisation'].mean:.0%}",
            f"of all GPU time was used by {best}",
            "until the last job's end",
        )


def _findings(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence for each arm on how it compares with the first."""
    for arm in comparison.runs.arms:
        ratios = comparison.ratios(arm.label)
        if arm.label == comparison.baseline or "avg_jct_seconds" not in ratios:
            continue
        jct = ratios["avg_jct_seconds"]
        told = f"{arm.label}: average JCT {_times(jct.mean)}"
        if len(jct.per_seed) > 1:
            told += f" ({_times(min(jct.per_seed))} to {_times(max(jct.per_seed))} over {len(jct.per_seed)} seeds)"
        for name, title in FOUND:
            if name in ratios:
                told += f", {title} {_times(ratios[name].mean)}"
        if comparison.bound:
            over = comparison.bound.arms[arm.label] / comparison.bound.avg_jct_seconds_min - 1
            told += f"; {over:.0%} above the lower bound"
        yield f"{told}."


def _assumptions(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Yield the assumptions behind the figures."""
    scenario = comparison.runs.arms[0].scenario
    ran = next((each[0] for each in comparison.runs.by_arm.values() if each), None)
    yield (
        "Trace",
        f"{scenario.trace}, {ran.result.jobs if ran else 0:,} jobs, format {ran.result.format if ran else '?'}",
    )
    yield "Trace's SHA-256", digest_of(scenario.trace) or "not a file"
    yield "Cluster", scenario.cluster
    yield "Overlay", scenario.overlay or "none: only what the trace records"
    physics = scenario.options.get("simulator", {})
    yield (
        "Physics",
        ", ".join(f"{key} = {value}" for key, value in sorted(physics.items()))
        or ("none: jobs run at reference speed everywhere, preemptions cost nothing, nothing fails"),
    )
    seeds = comparison.seeds
    yield (
        "Seeds",
        f"{seeds[0]} to {seeds[-1]}; an arm without randomness is run once" if len(seeds) > 1 else str(seeds[0]),
    )
    yield "Decisions", "take no time; a preempted job stops at once unless the physics options change that"
    yield "Plots over jobs and time", f"show each arm's run with seed {seeds[0]}"
    yield "Run with", ", ".join(f"{name} {version}" for name, version in versions().items())


def _choices(scenario: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for group in POLICY_GROUPS:
        given = scenario["options"].get(group, {})
        options = ", ".join(f"{key} = {value}" for key, value in given.items())
        yield group, f"{scenario[group]}{f' ({options})' if options else ''}"


def _unschedulable(comparison: Comparison) -> Iterator[tuple[str, str, int, str]]:
    for arm in comparison.runs.arms:
        for ran in comparison.runs.by_arm[arm.label][:1]:
            reasons = Counter(refusal.detail for _, refusal in ran.result.unschedulable)
            for reason, count in reasons.most_common(REASONS_MAX):
                jobs = [job_id for job_id, refusal in ran.result.unschedulable if refusal.detail == reason]
                named = ", ".join(jobs[:JOBS_NAMED_MAX]) + (" …" if len(jobs) > JOBS_NAMED_MAX else "")
                yield arm.label, reason, count, named


def _about(comparison: Comparison) -> list[tuple[str, str]]:
    about = comparison.as_json()["about"]
    return [(name, about[name]) for name in ("jct", "avg_queue_seconds", "gpu_utilisation", "ratios", "lower_bound")]
