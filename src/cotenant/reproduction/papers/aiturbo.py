"""Zhao et al., "AITurbo: Unified Compute Allocation for Partial Predictable Training in Commodity Clusters" (HPDC)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from cotenant.reproduction.model import (
    Asked,
    Better,
    Case,
    Cell,
    Chart,
    Claim,
    Done,
    Findings,
    Line,
    Measured,
    Shape,
    Table,
    line_of,
)
from cotenant.reproduction.papers.aiturbo_arms import (
    BACKFILL,
    BASES,
    BLIND,
    BORDA,
    ITP,
    ITP_BARE,
    ITP_CORES,
    ITP_FASTER,
    ITP_SERVERS,
    LARGE,
    LARGE_BARE,
    LAS,
    LEARNED,
    LITERAL,
    NOISY,
    OF_DATA,
    OPTIMUS,
    PERFECT,
    SEEING,
    SMALL,
    SMALL_BARE,
    SRSF,
    SRTF,
    Arm,
    Knowledge,
    Replayed,
    Workload,
)
from cotenant.reproduction.tables import MEANS, means, slug

BANDS = {"FIFO": 4.2, "LAS": 2.8, "SRTF": 1.9, "Optimus": 1.8}  # normalized average JCT; AITurbo's is 1.24 [D]
OURS_BAND = 1.24
SHARES = (0, 25, 50, 75, 100)  # percent of jobs that are unpredictable
UNSURE = (SRTF, OPTIMUS, LITERAL, BORDA)  # arms tried with each of them; the third is slow on large traces
CADENCES = (240, 1200, 3600, 14400)  # seconds
WEIGHTS = ((10, 5), (10, 0), (0, 5))  # units of a GPU and of a replica; the first pair is the default


class AITurbo:
    """Predictable and unpredictable jobs in one order."""

    name = "aiturbo"
    title = "AITurbo: unified compute allocation for partial predictable training"
    reference = "Zhao et al., HPDC 2021"
    assumptions = (
        "each trace runs on the smallest cluster of 8-GPU nodes whose offered load is at most 1 and that can hold its"
        " gangs; on ITP's that load is 0.32, so its jobs also arrive two and three times as fast; a stop costs 30 s of"
        " work; placement is consolidate",
        "jobs of public traces have neither users nor names, and so next to nothing to learn from. Unless it"
        " says `no names`, jobs have names as often as AITurbo's own jobs recur (71 %), which give the run time within"
        " a factor of two, and for 4.3 % of them a wrong one; predictors learn what a name means from ended jobs",
        "learned: `lightgbm-duration`, then `history`, queried once at submission. 30 % wrong: a log-normal"
        " error of 0.3. Perfect: the true run times",
        "gangs are rigid: AITurbo's and Optimus' changes of worker and server counts are not in these figures."
        " Optimus' greedy rule then orders jobs by remaining time × dominant share, updated every 10 minutes",
        "where speed depends on cores, jobs get Synergy's models; `borda-mlfq` uses the allocator `aiturbo`, the"
        " others give a job its GPUs' share",
        "`borda-mlfq` is our improvement of the paper's order, `literal Borda` the order itself, every 20 minutes",
        "all options are defaults; nothing is tuned for a trace",
    )
    unsaid = (
        "which baseline the 3× refers to: it is judged against each baseline",
        "the figures of each baseline: the bands are read from plots of code from the same lab",
        "which jobs are predictable: their loss-curve fits improve while a job runs; ours are queried once",
        "the production trace with its arrivals: only its jobs are public",
    )

    @cached_property
    def claims(self) -> Sequence[Claim]:
        """The headline, and the distance of each baseline."""
        return (
            Claim("jct", "their average JCT over ours", 3.0, "×", Better.HIGHER, "abstract [P]"),
            *(
                Claim(
                    f"jct-{base.queue}",
                    f"average JCT of {base.scheduler} over ours, same-lab band",
                    round(BANDS[base.scheduler] / OURS_BAND, 2),
                    "×",
                    Better.HIGHER,
                    "plots of the same lab [D]",
                )
                for base in BASES
            ),
        )

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Return cases that compare the arms on each workload, then vary shares, cadences and weights."""
        if asked.data.directory:  # reports bad data before anything is run
            for workload in _workloads(asked):
                workload.jobs(asked.data, asked.seeds[0])
        pairs = [(workload, arm) for workload in _workloads(asked) for arm in _compared(workload, asked)]
        pairs += [(workload, arm) for workload in _swept(asked) for arm in _shares(asked, workload)]
        if not asked.quick:
            pairs += [(ITP, arm) for arm in _cadences()]
            pairs += [(ITP_SERVERS, arm) for arm in _weights()]
        return [
            Case(workload.name, arm.name, seed, Replayed(workload, arm, asked.data, seed))
            for workload, arm in dict.fromkeys(pairs)
            for seed in asked.seeds
        ]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the ratios, and how they come about."""
        workloads, swept = _workloads(asked), _swept(asked)
        return Findings(
            tuple(one for workload in workloads for one in self._measured(asked, done, workload)),
            (
                *(_arms_table(asked, done, workload) for workload in workloads),
                *(_shares_table(asked, done, workload) for workload in swept),
                *(() if asked.quick else (_cadence_table(done), _weights_table(done))),
            ),
            (_bars(done, workloads), *(_share_lines(asked, done, workload) for workload in swept)),
        )

    def _measured(self, asked: Asked, done: Done, workload: Workload) -> Iterator[Measured]:
        headline, *bands = self.claims
        pairs = [*((headline, base) for base in (BACKFILL, *BASES)), *zip(bands, BASES, strict=True)]
        for knowledge in (LEARNED, PERFECT):
            ours = BORDA.knowing(knowledge)
            if ours not in _compared(workload, asked):
                continue
            for claim, base in pairs:
                theirs = base.knowing(knowledge) if base in SEEING else base
                ratio = done.versus(workload.name, theirs.name, ours.name, "avg_jct_hours", _ratio)
                sure = knowledge is PERFECT
                one = Measured(
                    claim, workload.name, ours.name, theirs.name, ratio, not sure, drawn_names=workload.recurs
                )
                told = claim is headline and base is LAS and not sure
                yield replace(one, why=_why(done, workload, theirs)) if told else one


def _ratio(theirs: float, ours: float) -> float:
    return theirs / ours if ours else math.nan


def _why(done: Done, workload: Workload, base: Arm) -> str:
    """Return how much an order could gain here at all."""
    best = SRSF.knowing(PERFECT)
    bound = done.versus(workload.name, base.name, best.name, "avg_jct_hours", _ratio)
    if bound is None:
        return ""
    return (
        f"shortest remaining service with perfect knowledge, close to the best order we know, is at {bound.mean:.2f}×:"
        " that is what an order could gain here; the rest is the cost of prediction errors"
    )


def _workloads(asked: Asked) -> Sequence[Workload]:
    if asked.quick:
        return (ITP, SMALL)
    data = OF_DATA if asked.data.directory else ()
    return (ITP, ITP_BARE, *ITP_FASTER, SMALL, SMALL_BARE, LARGE, LARGE_BARE, ITP_CORES, *data)


def _swept(asked: Asked) -> Sequence[Workload]:
    return (ITP,) if asked.quick else (ITP, SMALL)


def _compared(workload: Workload, asked: Asked) -> Sequence[Arm]:
    """Return the arms compared on a workload; without names, noise and perfect knowledge are as with them.

    The paper's own order stops jobs too often to be quick.
    """
    known = [one for one in (LEARNED, NOISY, PERFECT) if one == LEARNED or workload.recurs]
    if asked.quick:
        known.remove(NOISY)
    slow = workload.trace == LARGE.trace or (asked.quick and workload == SMALL)
    seeing = [arm.knowing(one) for one in known for arm in SEEING if arm != LITERAL or not slow]
    best = () if workload.recurs else (SRSF.knowing(PERFECT),)
    return (*BLIND, *seeing, *best)


def _shares(asked: Asked, workload: Workload) -> Sequence[Arm]:
    return [_unsure(arm, share) for share in _shares_of(asked) for arm in _tried(workload)]


def _tried(workload: Workload) -> Sequence[Arm]:
    return [arm for arm in UNSURE if arm != LITERAL or workload == ITP]


def _shares_of(asked: Asked) -> Sequence[int]:
    return SHARES[::2] if asked.quick else SHARES


def _unsure(arm: Arm, share: int) -> Arm:
    return arm.knowing(Knowledge(f"{share} % unpredictable", "noisy-oracle", 1 - share / 100))


def _cadences() -> Sequence[Arm]:
    return [arm for seconds in CADENCES for arm in _every(seconds)]


def _every(seconds: int) -> tuple[Arm, Arm, Arm]:
    setting = f"every {seconds} s"
    return (
        OPTIMUS.knowing(LEARNED).given(setting, interval_seconds=seconds),
        LITERAL.knowing(LEARNED).given(setting, variant="literal", cadence_seconds=seconds),
        BORDA.knowing(LEARNED).given(setting, cadence_seconds=seconds),
    )


def _weights() -> Sequence[Arm]:
    return [arm for weights in WEIGHTS for arm in _weighing(*weights)]


def _weighing(gpu: int, replica: int) -> tuple[Arm, Arm]:
    setting, weights = f"{gpu} and {replica}", {"gpu_weight": gpu, "replica_weight": replica}
    return (
        LITERAL.knowing(LEARNED).given(setting, variant="literal", cadence_seconds=1200, **weights),
        BORDA.knowing(LEARNED).given(setting, **weights),
    )


FIGURES = {  # columns of the table: title and number format
    "avg_jct_hours": ("average JCT (h)", ".1f"),
    "p99_jct_hours": ("99th percentile (h)", ".0f"),
    "makespan_days": ("makespan (days)", ".1f"),
    "stops": ("stops per job", ".2f"),
}


def _arms_table(asked: Asked, done: Done, workload: Workload) -> Table:
    titles, formats = zip(*FIGURES.values(), strict=True)
    ours = BORDA.knowing(LEARNED).name

    def times(arm: Arm) -> float:
        spread = done.versus(workload.name, arm.name, ours, "avg_jct_hours", _ratio)
        return spread.mean if spread else math.nan

    return Table(
        f"arms-{slug(workload.name)}",
        workload.name,
        ("arm", *titles, "JCT over ours, learned"),
        ("", *formats, ".2f"),
        tuple(
            (arm.name, *means(done, workload.name, arm.name, FIGURES), times(arm)) for arm in _compared(workload, asked)
        ),
        MEANS,
    )


def _shares_table(asked: Asked, done: Done, workload: Workload) -> Table:
    tried = _tried(workload)
    rows: list[tuple[Cell, ...]] = [
        (f"{share} %", *(done.mean(workload.name, _unsure(arm, share).name, "avg_jct_hours") for arm in tried))
        for share in _shares_of(asked)
    ]
    return Table(
        f"shares-{slug(workload.name)}",
        f"Average JCT (h) by share of unpredictable jobs: {workload.name}",
        ("unpredictable", *(arm.scheduler for arm in tried), LAS.scheduler),
        ("", *(".1f" for _ in (*tried, LAS))),
        tuple((*row, done.mean(workload.name, LAS.name, "avg_jct_hours")) for row in rows),
        "The run times of the other jobs are known, 30 % wrong. LAS uses no predictions.",
    )


def _cadence_table(done: Done) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for seconds in CADENCES:
        arms = _every(seconds)
        rows.append(
            (
                f"{seconds} s",
                *(done.mean(ITP.name, arm.name, name) for arm in arms for name in ("avg_jct_hours", "stops")),
            )
        )
    names = [arm.scheduler for arm in _every(CADENCES[0])]
    return Table(
        f"cadence-{slug(ITP.name)}",
        f"Interval between updates, learned predictions: {ITP.name}",
        ("every", *(f"{name}: {what}" for name in names for what in ("average JCT (h)", "stops per job"))),
        ("", *(form for _ in names for form in (".1f", ".2f"))),
        tuple(rows),
    )


def _weights_table(done: Done) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            f"{gpu} and {replica}",
            *(
                done.mean(ITP_SERVERS.name, arm.name, name)
                for arm in _weighing(gpu, replica)
                for name in ("avg_jct_hours", "stops")
            ),
        )
        for gpu, replica in WEIGHTS
    ]
    names = [arm.scheduler for arm in _weighing(*WEIGHTS[0])]
    return Table(
        "weights",
        f"Weights of a GPU and a replica, learned predictions: {ITP_SERVERS.name}",
        ("weights", *(f"{name}: {what}" for name in names for what in ("average JCT (h)", "stops per job"))),
        ("", *(form for _ in names for form in (".1f", ".2f"))),
        tuple(rows),
        "Every other gang is one process with all its GPUs, the rest have a parameter server for each worker; where all"
        " replicas have one GPU, weights change nothing.",
    )


def _bars(done: Done, workloads: Sequence[Workload]) -> Chart:
    ours = BORDA.knowing(LEARNED).name
    lines = []
    for arm in (*BASES, LITERAL, SRSF):
        one = arm.knowing(LEARNED) if arm in SEEING else arm
        spreads = [done.versus(load.name, one.name, ours, "avg_jct_hours", _ratio) for load in workloads]
        lines.append(line_of(arm.scheduler, spreads))
    return Chart(
        "jct",
        "Average JCT over that of borda-mlfq, learned predictions",
        "Above 1 ours is better. Strokes reach from the minimum to the maximum over the seeds.",
        Shape.BARS,
        "",
        "average JCT over ours",
        tuple(load.name.replace(", ", "\n") for load in workloads),
        tuple(lines),
        (("published", 3.0), ("as good as ours", 1.0)),
    )


def _share_lines(asked: Asked, done: Done, workload: Workload) -> Chart:
    lines, shares = [], _shares_of(asked)
    for arm in _tried(workload):
        spreads = [done.spread(workload.name, _unsure(arm, share).name, "avg_jct_hours") for share in shares]
        lines.append(line_of(arm.scheduler, spreads, math.nan))
    las = done.mean(workload.name, LAS.name, "avg_jct_hours")
    return Chart(
        f"unpredictable-{slug(workload.name)}",
        f"Average JCT by share of unpredictable jobs: {workload.name}",
        "Lower is better. The run times of the other jobs are known, 30 % wrong. Bands cover all seeds.",
        Shape.LINES,
        "unpredictable jobs (%)",
        "average JCT (h)",
        tuple(float(share) for share in shares),
        (*lines, Line(LAS.scheduler, (las,) * len(shares))),
    )


PAPER = AITurbo()
