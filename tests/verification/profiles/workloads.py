"""Kinds of work, each of which one paper is about, and the figures of profiles on them.

The trace is the bundled sample of Microsoft's ITP with 260 jobs. What it does not tell (models, cores, jobs without
GPUs, deadlines) is drawn with a seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.policy.profiles import DEFAULT
from cotenant.simulator.comparison.arms import arms_of
from cotenant.simulator.comparison.summary import compare
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.traces import SAMPLE

FIGURE = "avg_jct_seconds"
AVERAGE_MAX = 1.02  # × another profile's: noise
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of work: overlays on the sample, and what slows its jobs down."""

    name: str
    profile: str
    overlay: str
    speed: str
    cluster: str = "2x8"

    def scenario(self, seed: int, trace: str = SAMPLE) -> Scenario:
        """Return the scenario of a seed, on the sample or another trace."""
        options = {"simulator": {"speed": self.speed}}
        return Scenario(trace, self.cluster, overlay=f"{self.overlay},seed={seed}", options=options)


WORKLOADS = (
    Workload("CPU jobs beside training", "paper:coda", "models=synergy,cpu-jobs=openb:0.3", "cores,bandwidth"),
    Workload("rigid training", "paper:aiturbo", "models=synergy", "cores"),
    Workload("gangs over servers", "paper:philly", "models=gavel", "locality", "4x4"),
    Workload("training that needs many cores", "paper:xiao", "models=synergy,cores=auto", "cores"),
)


def ratios(
    workload: Workload, others: Sequence[str], seeds: Iterable[int], trace: str = SAMPLE
) -> Mapping[str, list[float]]:
    """Return the average JCT of the default profile ÷ that of each other profile, one for each seed."""
    found: dict[str, list[float]] = {other: [] for other in others}
    for seed in seeds:
        comparison = compare(arms_of([DEFAULT, *others], (), workload.scenario(seed, trace)), processes=1)
        mean = {arm: comparison.figures(arm)[FIGURE].mean for arm in (DEFAULT, *others)}
        for other in others:
            found[other].append(mean[DEFAULT] / mean[other])
    return found


def behind(found: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the profiles that the default is behind: by more than noise, and `plain` at all, by the median."""
    medians = {other: statistics.median(values) for other, values in found.items()}
    return [other for other, median in medians.items() if median > (1.0 if other == PLAIN else AVERAGE_MAX)]
