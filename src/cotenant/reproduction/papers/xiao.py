"""Xiao et al., "Scheduling CPU for GPU-based Deep Learning Jobs" (SoCC 2018, poster)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from cotenant.core.model.model_name import Model, model_of
from cotenant.core.prediction import experiment_design
from cotenant.core.prediction.core_curve import Point, fit
from cotenant.reproduction.model import (
    Asked,
    Better,
    Case,
    Cell,
    Chart,
    Claim,
    Done,
    Figures,
    Findings,
    Line,
    Measured,
    Shape,
    Stopped,
    Table,
    gain_percent,
    line_of,
)
from cotenant.reproduction.papers.xiao_jobs import (
    ARMS,
    BALANCED,
    BOUND,
    BY_ITSELF,
    CROWDED,
    EQUAL,
    KNOWN_BALANCED,
    LEARNED,
    ROLES,
    SWEEPS,
    SWEPT_ARMS,
    TRIED,
    Arm,
    Replay,
    Sweep,
    Workload,
    workloads,
)
from cotenant.reproduction.tables import MEANS, by_arm, each, slug
from cotenant.simulator.comparison.summary import Spread
from cotenant.simulator.physics.cores import speed

CORES_MAX = 24  # of the poster's virtual machine
NOISE = 0.03  # of a rate over some tens of iterations, relative [R]
LINEAR_SHARE = 0.5  # of the best rate, which is the linear part's: Synergy's curves rise nearly as a line [R]
BEST_CORES = MappingProxyType(  # for the best speed on one P100 [P]
    {
        "LeNet": 20,
        "AlexNet": 19,
        "OverFeat": 22,
        "GoogLeNet": 11,
        "language model": 1,
        "Bi-Att-Flow": 8,
        "DeepSpeech": 3,
        "WaveNet": 3,
    }
)
PROFILED = ("alexnet", "resnet18", "mobilenet", "resnet50", "deepspeech", "gnmt", "transformer")  # by Synergy
EIGHT, MEASURED = "the poster's eight models", "Synergy's measured models"
WORTH = "What the cores are worth"
FOUND = ("cores", "speed_percent", "points", "error_percent")
SOURCE = "poster [P]"
WHY = {  # by the baseline and the figure
    (EQUAL.name, "utilisation_percent"): "equal shares starve only the models that need more than their share; on"
    " servers with six cores a GPU that is half of the poster's, with three most of Synergy's vision models",
    (EQUAL.name, "jct_seconds"): "no job can be faster than with all the cores it can use, which bounds the gain:"
    " the rows with perfect predictions show by how much",
    (
        CROWDED.name,
        "utilisation_percent",
    ): "a job that is alone on its server has all cores, and the cost of oversubscription is"
    " the mildest published measurement; with the worst, 8.4 times (pytorch/pytorch#3021), any arm would be better",
    (
        CROWDED.name,
        "jct_seconds",
    ): "shared cores go to the jobs that can use them; if oversubscription were free, that would be"
    " about as good as knowing θ in advance, so all there is to gain is the cost of oversubscription",
    (ROLES.name, "utilisation_percent"): "four cores a GPU are few for the poster's models; on servers with three cores"
    " a GPU they are more than a fair share, so that jobs run as fast as ours and GPUs stand idle without cores",
    (ROLES.name, "jct_seconds"): "where cores are few, shares by role leave GPUs idle and jobs wait; where they are"
    " many, cores lie idle while jobs starve",
}


@dataclass(frozen=True, slots=True)
class Learning:
    """A model whose curve is measured by the experiment design, with noise, and fitted.

    The curve is the poster's form with its θ, or as measured by Synergy.
    """

    model: str
    seed: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Measure until the design is complete."""
        truth, rng = true_rates(self.model), np.random.default_rng([self.seed, *self.model.encode()])
        points: list[Point] = []
        while planned := experiment_design.plan(points, CORES_MAX).cores:
            if stopped():
                return None
            cores = planned[0]
            points.append(Point(cores, truth[cores] * (1 + NOISE * rng.standard_normal())))
        curve = fit(points, CORES_MAX)
        errors = [abs(curve.rate(cores) / rate - 1) for cores, rate in truth.items()]
        return Figures(
            {
                "cores": float(curve.cores_useful),
                "points": float(len(points)),
                "error_percent": 100.0 * float(np.mean(errors)),
                "speed_percent": 100.0 * truth[curve.cores_useful],
            }
        )


def true_rates(model: str) -> dict[int, float]:
    """Return a model's rates by cores, as shares of the best."""
    if theta := BEST_CORES.get(model):
        return {cores: rate_of(theta, cores) for cores in range(1, CORES_MAX + 1)}
    known = model_of(model) or Model(model, "")
    rates = {cores: speed(known, gpus=1, cores_per_gpu=cores) or 1.0 for cores in range(1, CORES_MAX + 1)}
    best = max(rates.values())
    return {cores: rate / best for cores, rate in rates.items()}


def best_cores(model: str) -> int:
    """Return the fewest cores with the best speed."""
    return next(cores for cores, rate in true_rates(model).items() if rate >= 1.0 - 1e-9)


def rate_of(theta: int, cores: int) -> float:
    """Return a model's rate as a share of its best: P₀·log C + P₁·C below θ.

    >>> rate_of(8, 8), rate_of(1, 24), round(rate_of(8, 2), 2)
    (1.0, 1.0, 0.29)
    """
    if cores >= theta:
        return 1.0
    return (1 - LINEAR_SHARE) * math.log(cores) / math.log(theta) + LINEAR_SHARE * cores / theta


class Xiao:
    """The cores a job needs, and the cost of a wrong number."""

    name = "xiao"
    title = "Scheduling CPU for GPU-based Deep Learning Jobs"
    reference = "Xiao et al., SoCC 2018 (poster)"
    assumptions = (
        "for the predictor's error the eight models have the poster's form of curve and its best core counts,"
        f" others the rates that Synergy measured; rates are measured with a relative noise of {NOISE:.0%}",
        "jobs have one GPU each, like the poster's, and one of the eight models, or of Synergy's, drawn uniformly;"
        " their speed by cores is that of the simulator (docs/simulator-physics.md)",
        "their run time, at 3 cores, is drawn from openb's pods that ran for a minute to a day",
        "the poster does not say where jobs are placed: with cores balanced, a job goes to the server with the largest"
        " share of free cores, else to the one with the fewest free GPUs, where jobs that need many cores meet",
        "the bound is the same order on servers with as many cores as their jobs can use, all known in advance",
        "servers have 24 cores like the poster's machine, and 4 GPUs, or 8 like Synergy's servers",
        "a GPU counts as fully used while its job runs at its maximum speed over all core counts, and in proportion"
        " if too few cores starve it; utilization is the mean over the time that jobs hold GPUs",
        "with learned curves a model is known from its earlier jobs, and the allocator tries core counts"
        " on running jobs; rates have a noise of 2 %, and all options are defaults",
        "without isolation the cores of a server are shared max-min fairly, a job that wants more than it gets has as"
        " many threads as the server has cores, and with 2.5 threads a core 29.5 % of their work is lost"
        " (docs/simulator-physics.md gives the sources)",
        "in the sweeps the best load is judged, the one with the largest mean over the seeds; the tables show"
        " every load. A load is the GPU time that jobs need at 3 cores over the available GPU time while they arrive",
        "the order is fifo: no job is stopped for another",
    )
    unsaid = (
        "the parameters of the eight curves: only their best core counts are given",
        "the mix of jobs, how many there were, and on how many machines",
        "which of its three baselines the headline figures refer to: each is tried",
        "the load of its machines, which decides how much of a gain in speed becomes one in completion time",
        "what its jobs lost without isolation",
        "whether the utilization is of all GPUs or of those in use: with a given amount of work that of all GPUs only"
        " reflects how long the last job took",
    )

    @cached_property
    def claims(self) -> Sequence[Claim]:
        """The gain over each of the baselines in utilization and completion time."""
        return tuple(
            claim
            for base in (one.name for one in BASES)
            for claim in (
                Claim(f"utilisation, {base}", f"GPU utilization over {base}", 19.0, "%", Better.HIGHER, SOURCE),
                Claim(f"jct, {base}", f"average JCT against {base}", -34.0, "%", Better.LOWER, SOURCE),
            )
        )

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return each arm on each workload and at each load, and each curve to learn."""
        pairs = [(workload, _arms_of(asked)) for workload in workloads(asked)]
        pairs += [(point, SWEPT_ARMS) for sweep in SWEEPS for point in sweep.points(asked).values()]
        replays = [
            case
            for workload, arms in pairs
            for case in each([workload], asked.seeds, arms, lambda load, arm, seed: Replay(load, arm, asked.data, seed))
        ]
        learnt = [
            Case(group, model, seed, Learning(model, seed))
            for group, models in GROUPS.items()
            for seed in asked.seeds
            for model in models
        ]
        return [*replays, *learnt]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the gains, and the found cores beside the best ones."""
        names = [workload.name for workload in workloads(asked)]
        swept = [(sweep, sweep.points(asked)) for sweep in SWEEPS]
        return Findings(
            (
                *(one for name in names for one in self._measured(done, name)),
                *(one for sweep, points in swept for one in self._best(done, sweep, points)),
            ),
            (
                *(
                    by_arm(done, name, [arm.name for arm in _arms_of(asked)], FIGURES, title=f"{WORTH}: {name}")
                    for name in names
                ),
                *(_swept(done, sweep, points) for sweep, points in swept),
                *(_curves(done, group) for group in GROUPS),
            ),
            (_gains(done, names), *(_by_load(done, sweep, points) for sweep, points in swept), _cores_found(done)),
        )

    def _pairs(self) -> Iterator[tuple[Arm, Claim, str]]:
        """Yield each claim with its baseline and its figure."""
        figures = ("utilisation_percent", "jct_seconds") * len(BASES)
        bases = (base for base in BASES for _ in range(2))
        yield from zip(bases, self.claims, figures, strict=True)

    def _measured(self, done: Done, workload: str) -> Iterator[Measured]:
        for arm, learned in JUDGED:
            for base, claim, figure in self._pairs():
                gain = done.versus(workload, arm.name, base.name, figure, gain_percent)
                bound = done.versus(workload, BOUND.name, base.name, figure, gain_percent)
                why = WHY[base.name, figure] if learned else ""
                yield Measured(claim, workload, arm.name, base.name, gain, learned, why, bound)

    def _best(self, done: Done, sweep: Sweep, points: Mapping[float, Workload]) -> Iterator[Measured]:
        """Yield each claim at the load with its best mean."""
        for base, claim, figure in self._pairs():
            sign = 1 if claim.better is Better.HIGHER else -1
            gains = {
                load: gain
                for load, point in points.items()
                if (gain := done.versus(point.name, BALANCED.name, base.name, figure, gain_percent))
            }
            best = max(gains, key=lambda load: sign * gains[load].mean, default=None)
            if best is None:
                yield Measured(claim, sweep.name, BALANCED.name, base.name, None)
                continue
            why = f"the best of the sweep, at a load of {best:g}: {_all_in_words(gains)}"
            bound = done.versus(points[best].name, BOUND.name, base.name, figure, gain_percent)
            yield Measured(claim, sweep.name, BALANCED.name, base.name, gains[best], why=why, bound=bound)


def _all_in_words(gains: Mapping[float, Spread]) -> str:
    """Return the mean gain at each load as text."""
    return ", ".join(f"{gain.mean:+.1f} % at {load:g}" for load, gain in gains.items())


def _arms_of(asked: Asked) -> Sequence[Arm]:
    return [arm for arm in ARMS if not (asked.quick and arm == BY_ITSELF)]


# The arms beside the poster's headlines, and whether what they know is learned.
JUDGED = ((BALANCED, True), (KNOWN_BALANCED, False))
BASES = (EQUAL, ROLES, CROWDED)  # in the order of the claims
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType({EIGHT: tuple(BEST_CORES), MEASURED: PROFILED})
FIGURES = {  # columns of the table: title and number format
    "jct_seconds": ("average JCT (s)", ".0f"),
    "makespan_seconds": ("makespan (s)", ".0f"),
    "utilisation_percent": ("utilization of held GPUs (%)", ".1f"),
    "run_seconds": ("average run (s)", ".0f"),
    "cores_percent": ("cores held (%)", ".1f"),
    "resizes": ("changes of cores per job", ".1f"),
}


def _swept(done: Done, sweep: Sweep, points: Mapping[float, Workload]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for load, point in points.items():
        figures = ((arm, name) for name in ("jct_seconds", "utilisation_percent") for arm in SWEPT_ARMS)
        rows.append((load, *(done.mean(point.name, arm.name, name) for arm, name in figures)))
    return Table(
        f"sweep-{slug(sweep.name)}",
        f"Average JCT and utilization by load: {sweep.name}",
        (
            "load",
            *(f"JCT (s), {arm.name}" for arm in SWEPT_ARMS),
            *(f"utilization (%), {arm.name}" for arm in SWEPT_ARMS),
        ),
        ("g", *(".0f" for _ in SWEPT_ARMS), *(".1f" for _ in SWEPT_ARMS)),
        tuple(rows),
        MEANS,
    )


def _by_load(done: Done, sweep: Sweep, points: Mapping[float, Workload]) -> Chart:
    lines = []
    for base in BASES:
        spreads = [
            done.versus(point.name, BALANCED.name, base.name, "jct_seconds", _shorter_percent)
            for point in points.values()
        ]
        lines.append(line_of(f"against {base.name}", spreads, math.nan))
    return Chart(
        f"load-{slug(sweep.name)}",
        f"Reduction of the average JCT by load: {sweep.name}",
        "Higher is better. Shades cover all seeds; the dashed line is the poster's.",
        Shape.LINES,
        "load",
        "average JCT shorter by (%)",
        tuple(points),
        tuple(lines),
        (("published", 34.0),),
    )


def _curves(done: Done, group: str) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (model, float(best_cores(model)), *(done.mean(group, model, name) for name in FOUND)) for model in GROUPS[group]
    ]
    columns = ("model", "cores, best", "cores, found", "speed (% of the best)", "points", "curve's error (%)")
    title = f"The predictor's error, and cores for the best speed: {group}"
    return Table(f"curves-{slug(group)}", title, columns, ("", ".0f", ".1f", ".1f", ".1f", ".1f"), tuple(rows))


def _gains(done: Done, names: Sequence[str]) -> Chart:
    lines = []
    for arm in (LEARNED, BALANCED, TRIED, KNOWN_BALANCED, BOUND):
        spreads = [done.versus(name, arm.name, EQUAL.name, "jct_seconds", _shorter_percent) for name in names]
        lines.append(line_of(arm.name, spreads))
    return Chart(
        "jct",
        "Average reduction of JCT compared with equal shares",
        "Higher is better. Strokes span all seeds; the dashed line is the poster's.",
        Shape.BARS,
        "",
        "shorter by (%)",
        tuple(names),
        tuple(lines),
        (("published", 34.0),),
    )


def _cores_found(done: Done) -> Chart:
    found = tuple(done.mean(EIGHT, model, "cores") for model in BEST_CORES)
    return Chart(
        "cores",
        "Cores for the best speed of the poster's eight models",
        "Closer is better. Found from some noisy rates of each; means over the seeds.",
        Shape.BARS,
        "",
        "cores",
        tuple(BEST_CORES),
        (
            Line("published", tuple(map(float, BEST_CORES.values()))),
            Line("found", tuple(0.0 if math.isnan(one) else one for one in found)),
        ),
    )


def _shorter_percent(ours: float, theirs: float) -> float:
    return -gain_percent(ours, theirs)


PAPER = Xiao()
