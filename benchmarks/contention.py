"""Detection and relief by the eliminator, its false alarms, and its cost; all on model nodes.

Quiet days are days of windows with 5 % noise and no victim: on a calm node, on a node whose CPU jobs come and go all
day, and on a node whose memory bandwidth is above its limit all day. Any action on a quiet day is a false alarm.
Slowdowns begin at a random time within a window, which counts as the first window. Suspects that mask each other each
saturate the memory alone, so throttling only one of them has no effect.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import harness

from cotenant.conformance.contention_node import CpuJob, ModelNode, Trainer, hog, saturator
from cotenant.core.policy.protocols import AttemptWindow, ContentionPolicy, NodeWindow
from cotenant.policies.coda_eliminator.policy import CodaEliminator
from cotenant.policies.coda_eliminator.thresholds import Thresholds
from cotenant.policies.no_contention import NoContention

DAY_WINDOWS, HOUR_WINDOWS = 17_280, 720
LEARNT_WINDOWS = 60
SLOWDOWNS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6)
BARRED = 0.15  # bars apply to slowdowns from here on
HARDWARE = {"held to shares": (True, True), "told only": (True, False), "told nothing": (False, False)}
NOTICED_MAX, RELIEVED_MAX, WELL, KEPT = 3, 6, 0.95, 0.1
SIZES = (10, 100, 1000)
JOINT = {
    2: 3.5,
    3: 2.2,
    4: 1.9,
}  # number of CPU jobs that each saturate the memory alone, and the demand of each relative to the peak
SATURATION = 1.5  # of the peak; demand beyond it causes no further slowdown
JOINT_WINDOWS, JOINT_WELL_MIN = 30, 97.0
GROWTH_MAX = 2.0  # of the time per attempt, from 10 to 1,000 attempts


def calm(seed: int, windows: int) -> ModelNode:
    """Return a node with four training jobs and four CPU jobs that take a third of the bandwidth."""
    return ModelNode(_trainers(), [CpuJob(f"cpu-{number}", demand=5e9, cores=4) for number in range(4)], seed)


def busy(seed: int, windows: int) -> ModelNode:
    """Return a node without bandwidth counters; a CPU job arrives every five minutes and runs for four, on average."""
    rng = random.Random(seed)
    jobs: list[CpuJob] = []
    now = 300.0
    while now < 5.0 * windows:
        now += rng.expovariate(1 / 300)
        jobs.append(CpuJob(f"cpu-{len(jobs)}", demand=2e9, cores=4, begin=now, end=now + rng.expovariate(1 / 240)))
    return ModelNode(_trainers(), jobs, seed, reported=False)


def full(seed: int, windows: int) -> ModelNode:
    """Return a node whose memory bandwidth is at 90 % of its peak all day, without a victim."""
    return ModelNode(_trainers(), [CpuJob(f"cpu-{number}", demand=17.5e9, cores=4) for number in range(4)], seed)


def _trainers() -> list[Trainer]:
    return [Trainer(f"dnn-{number}", 5.0 * (number + 1), demand=5e9) for number in range(4)]


QUIET = {"calm": calm, "CPU jobs come and go": busy, "bandwidth at 90 %": full}


def false_alarms(quick: bool) -> Iterator[harness.Row]:
    """Count actions on quiet days."""
    seeds = range(2 if quick else 10)
    windows = DAY_WINDOWS // (6 if quick else 1)
    for name, make in QUIET.items():
        began, alarms, hour = time.process_time(), 0, 0
        for seed in seeds:
            node, policy = make(seed, windows), CodaEliminator()
            for number in range(windows):
                directives = policy.judge(node.window())
                node.apply(directives)
                trials = sum("on trial" in directive.reason for directive in directives)
                alarms += trials
                hour += trials * (number < HOUR_WINDOWS)
        days = len(seeds) * windows / DAY_WINDOWS
        bar = "at most 1"
        yield harness.Row(f"false alarms a day, {name}", alarms / days, "1/day", days, "days", bar, alarms <= days)
        bar, held = ("0", hour == 0) if name == "calm" else ("", None)
        yield harness.Row(f"  in the first hours, {name}", hour, "1", float(len(seeds)), "hours", bar, held)
        print(f"{name}: {time.process_time() - began:.0f} s", file=sys.stderr, flush=True)


class Slowdown(NamedTuple):
    """The outcome of one slowdown: windows until it was noticed and relieved, and the speed that the CPU job kept."""

    noticed: int
    relieved: int
    well_at_6: bool
    kept: float
    lost: float  # of the training job's work, over the ten minutes after it began


def run_slowdown(policy: ContentionPolicy, slowdown: float, seed: int, reported: bool, enforced: bool) -> Slowdown:
    """Run one slowdown of a training job by a CPU job."""
    rng = random.Random(seed)
    trainer = Trainer()
    cpu_job = hog(slowdown, trainer, begin=5.0 * LEARNT_WINDOWS + 5.0 * rng.random())
    node = ModelNode([trainer], [cpu_job], seed, reported=reported, enforced=enforced)
    node.run(policy, LEARNT_WINDOWS)
    speeds: list[float] = []
    noticed = 0
    for number in range(1, 121):
        directives = policy.judge(node.window())
        speeds.append(trainer.speed)
        node.apply(directives)
        if directives and not noticed:
            noticed = number
    after = [number for number, speed in enumerate(speeds, 1) if noticed and number > noticed and speed >= WELL]
    ran = [speed / cpu_job.speed_alone for speed in cpu_job.speeds[1:] if speed > 0]
    return Slowdown(
        noticed or 999, after[0] if after else 999, speeds[5] >= WELL, min(ran), 1 - statistics.fmean(speeds)
    )


def detection(quick: bool) -> Iterator[harness.Row]:
    """Measure how soon slowdowns are noticed and relieved."""
    seeds = range(20 if quick else 200)
    kept: list[float] = []
    for name, (reported, enforced) in HARDWARE.items():
        for slowdown in SLOWDOWNS:
            slowdowns = [run_slowdown(CodaEliminator(), slowdown, seed, reported, enforced) for seed in seeds]
            kept += [one.kept for one in slowdowns]
            off = statistics.fmean(
                run_slowdown(NoContention(), slowdown, seed, reported, enforced).lost for seed in seeds[:5]
            )
            barred, what = slowdown >= BARRED, f"slowdown {slowdown:.0%}, bandwidth {name}"
            noticed = statistics.median(one.noticed for one in slowdowns)
            bar, holds = (f"at most {NOTICED_MAX}", noticed <= NOTICED_MAX) if barred else ("", None)
            yield harness.Row(f"windows until noticed, median, {what}", noticed, "1", bar=bar, holds=holds)
            in_time = 100 * statistics.fmean(one.noticed <= NOTICED_MAX for one in slowdowns)
            yield harness.Row(f"  noticed within {NOTICED_MAX}", in_time, "%")
            relieved = statistics.median(one.relieved for one in slowdowns)
            bar = f"at most {RELIEVED_MAX}" if barred else ""
            holds = relieved <= RELIEVED_MAX if barred else None
            yield harness.Row(
                f"  windows until {WELL:.0%} of the baseline, median", relieved, "1", bar=bar, holds=holds
            )
            well = 100 * statistics.fmean(one.well_at_6 for one in slowdowns)
            yield harness.Row(f"  at {WELL:.0%} in window {RELIEVED_MAX}", well, "%")
            lost = 100 * statistics.fmean(one.lost for one in slowdowns)
            yield harness.Row("  speed lost over ten minutes", lost, "%", 100 * off, "eliminator off")
        print(name, file=sys.stderr, flush=True)
    least = 100 * min(kept)
    yield harness.Row(
        "least speed of a CPU job that is not suspended", least, "%", bar="at least 10", holds=least > 9.99
    )


class Joint(NamedTuple):
    """The outcome for a victim of suspects that mask each other: first recovery, and speed from then on."""

    well: int  # the window
    lasting: float  # its median speed in the five minutes after the first `JOINT_WINDOWS`
    kept: float  # minimum speed of a CPU job that is not suspended, relative to that before any throttling


def joint(count: int, seed: int, limits: Thresholds) -> Joint:
    """Start CPU jobs that each saturate the memory alone."""
    jobs = [saturator(f"cpu-{number}", JOINT[count], begin=5.0 * LEARNT_WINDOWS) for number in range(count)]
    trainer, policy = Trainer(), CodaEliminator(limits)
    node = ModelNode([trainer], jobs, seed, reported=False, saturation=SATURATION)
    node.run(policy, LEARNT_WINDOWS)
    speeds = []
    for _ in range(JOINT_WINDOWS + 60):
        node.run(policy, 1)
        speeds.append(trainer.speed)
    ran = [speed / job.speeds[0] for job in jobs for speed in job.speeds if speed > 0]
    well = next((number for number, speed in enumerate(speeds, 1) if speed >= WELL), 999)
    return Joint(well, statistics.median(speeds[JOINT_WINDOWS:]), min(ran))


def masked_suspects(quick: bool) -> Iterator[harness.Row]:
    """Measure how often and how soon a victim is relieved of suspects that mask each other."""
    seeds = range(50 if quick else 500)
    kept: list[float] = []
    for count in JOINT:
        together = [joint(count, seed, Thresholds()) for seed in seeds]
        alone = [joint(count, seed, Thresholds(suspects_together_max=1)) for seed in seeds]
        kept += [one.kept for one in together]
        well, otherwise = (100 * statistics.fmean(one.lasting >= WELL for one in ones) for ones in (together, alone))
        yield harness.Row(
            f"victims well for good of {count} suspects that hide each other", well, "%", otherwise,
            "each tried alone", f"at least {JOINT_WELL_MIN:g}", well >= JOINT_WELL_MIN,
        )  # fmt: skip
        yield harness.Row("  windows until then, median", statistics.median(one.well for one in together), "1")
    least = 100 * min(kept)
    what = "least speed of one that is not suspended, of that among the others before"
    yield harness.Row(what, least, "%", bar="at least 10", holds=least > 9.99)


def crowded_window(count: int, number: int, rng: random.Random) -> NodeWindow:
    """Return a window of a node with `count` attempts, half of them CPU jobs."""
    attempts = tuple(
        AttemptWindow(
            f"job-{one}",
            1,
            cpu_job=bool(one % 2),
            cores_used=4.0,
            rate_per_second=None if one % 2 else 10 * (1 + 0.05 * rng.gauss(0, 1)),
            memory_bandwidth_bytes_per_second=1e9,
            cores=4,
        )
        for one in range(count)
    )
    return NodeWindow("n1", 5.0 * number, 5.0, attempts, memory_bandwidth_bytes_per_second=1e9 * count)


def cost(quick: bool) -> Iterator[harness.Row]:
    """Measure the CPU time of one policy call by the number of attempts."""
    rng, each = random.Random(0), {}
    for count in SIZES:
        policy, spent = CodaEliminator(), []
        for number in range(40 if quick else 120):
            window = crowded_window(count, number, rng)
            began = time.process_time()
            policy.judge(window)
            spent.append(time.process_time() - began)
        each[count] = statistics.median(spent[20:]) / count
        yield harness.Row(f"processor time of one question, {count} attempts", 1000 * each[count] * count, "ms")
    share = 100 * each[SIZES[1]] * SIZES[1] / 5.0
    yield harness.Row(f"share of a core for a node with {SIZES[1]} attempts, every 5 s", share, "%")
    grown = each[SIZES[-1]] / each[SIZES[0]]
    bar = f"at most {GROWTH_MAX:g} times for 100 times the attempts"
    yield harness.Row("growth of the time for each attempt", grown, "1", bar=bar, holds=grown <= GROWTH_MAX)


def measure(quick: bool) -> Sequence[harness.Row]:
    """Measure detection and relief, masked suspects, false alarms and cost."""
    return [*detection(quick), *masked_suspects(quick), *false_alarms(quick), *cost(quick)]


if __name__ == "__main__":
    harness.main(measure, "Detection and relief by the eliminator, its false alarms, and its cost")
