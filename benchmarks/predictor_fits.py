"""The accuracy of rates predicted from few measurements, on public profiles, compared with naive methods.

`xiao-piecewise` measures at most four core counts of each of Synergy's 33 sensitivity profiles (OSDI 2022), with 2 %
noise, chosen one by one; the references are bisection and step-by-step search, which interpolate between measurements.
`scaling` is fitted to the three smallest placements of each model and batch size of Pollux (OSDI 2021) and ElasticFlow
(ASPLOS 2023) and predicts the others; the reference is GENIE's log₂ model between nodes. A prediction counts as sure
if its confidence is at least 0.5. `parameter-server` predicts each team of AITurbo's production jobs (HPDC 2021) from
five windows of each other team of its kind; the references are the unsure predictions. The data are in ../shared/data;
without them the rows are left out, with a message.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.core.model.estimate import Candidate, Observation, Query  # noqa: E402 - likewise
from cotenant.core.prediction import experiment_design  # noqa: E402 - likewise
from cotenant.core.prediction.core_curve import Point, fit  # noqa: E402 - likewise
from cotenant.policies.parameter_server import ParameterServer  # noqa: E402 - likewise
from cotenant.policies.scaling import Scaling  # noqa: E402 - likewise
from cotenant.policies.xiao_piecewise import XiaoPiecewise  # noqa: E402 - likewise

DATA = ROOT.parent / "shared" / "data"
CORES = (1, 2, 3, 4, 5, 6, 9, 12, 24)  # rows of Synergy's profiles
NOISE, POINTS, SEEDS, SEEDS_QUICK = 0.02, 4, 20, 4
ENOUGH = 0.98  # this share of the best rate counts as the best rate
SURE = 0.5
GPUS_PER_NODE = {"throughputs_A100": 8, "throughputs_T4": 4}

Profile = Mapping[int, float]  # rates by cores


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one method on one noisy profile."""

    steps_off: int  # of θ, on the measured grid
    error: float  # mean relative error of the rate over all core counts
    points: int
    covered: bool = True  # θ lies in the interval
    confident: float = 1.0  # mean confidence in the rates
    within: float = 1.0  # share of the rates within 15 %


def profiles() -> dict[str, Profile]:
    """Return Synergy's profiles with the largest memory; a rate of 0 means infeasible."""
    path = DATA / "synergy" / "cpu_mem_sensitivity_profiles.json"
    read = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: {cores: float(row[-1]) for cores, row in zip(CORES, profile["tput"], strict=True) if row[-1] > 0}
        for name, profile in sorted(read.items())
    }


def theta_of(profile: Profile) -> int:
    return min(cores for cores, rate in profile.items() if rate >= ENOUGH * max(profile.values()))


def steps_between(profile: Profile, one: int, other: int) -> int:
    grid = sorted(profile)
    return abs(int(np.searchsorted(grid, one)) - int(np.searchsorted(grid, other)))


def designed(profile: Profile, noisy: Profile) -> Outcome:
    """Measure by the experiment design, and query the predictor."""
    predictor, points, grid = XiaoPiecewise(), list[Point](), sorted(profile)
    while len(points) < POINTS and (left := experiment_design.plan(points, grid[-1], grid).cores):
        points.append(Point(left[0], noisy[left[0]]))
        seen = Candidate(left[0], 1000)
        predictor.observe(Observation("ann", "m", "", 1000, 1, seen, rate_per_second=noisy[left[0]]))
    estimate = predictor.estimate(Query("ann", "m", "", 1000, 1, candidates=tuple(Candidate(cores) for cores in grid)))
    errors = [
        abs((judged.rate_per_second or 0.0) / profile[cores] - 1)
        for cores, judged in zip(grid, estimate.candidates, strict=True)
    ]
    low, high = (int(np.searchsorted(grid, edge)) for edge in fit(points).interval)
    return Outcome(
        steps_between(profile, estimate.cores_useful or grid[-1], theta_of(profile)),
        statistics.fmean(errors),
        len(points),
        low <= grid.index(theta_of(profile)) <= high,
        statistics.fmean(judged.confidence for judged in estimate.candidates),
        statistics.fmean(error <= 0.15 for error in errors),
    )


def lines(profile: Profile, noisy: Profile, measured: Sequence[int]) -> Outcome:
    """Interpolate between measurements; θ is the first core count that reaches the rate of the largest."""
    cores = sorted(measured)
    rates = [noisy[count] for count in cores]
    theta = next(count for count in cores if noisy[count] >= (ENOUGH - 2 * NOISE) * rates[-1])
    errors = [abs(float(np.interp(count, [0, *cores], [0.0, *rates])) / rate - 1) for count, rate in profile.items()]
    return Outcome(steps_between(profile, theta, theta_of(profile)), statistics.fmean(errors), len(cores))


def halving(profile: Profile, noisy: Profile, points: int = POINTS) -> Outcome:
    """Measure the most cores, then bisect the interval where the plateau ends, then the widest gaps."""
    grid = sorted(profile)
    measured, low, high = [len(grid) - 1], -1, len(grid) - 1
    while len(measured) < min(points, len(grid)):
        if high - low > 1:
            middle = (low + high) // 2
            enough = noisy[grid[middle]] >= (ENOUGH - 2 * NOISE) * noisy[grid[-1]]
            low, high = (low, middle) if enough else (middle, high)
        else:
            edges = [-1, *sorted(measured)]
            middle = max(pairwise(edges), key=lambda gap: (gap[1] - gap[0], gap))[1] - 1
            middle = next(at for at in [*range(middle, -1, -1), *range(len(grid))] if at not in measured)
        measured.append(middle)
    return lines(profile, noisy, [grid[at] for at in measured])


def stepping(profile: Profile, noisy: Profile) -> Outcome:
    """Start with 3 cores; step up while it gains 2 %, or, if the first step does not, down while it costs nothing."""
    grid = sorted(profile)
    at = min(2, len(grid) - 1)
    measured = [at]
    while at + 1 < len(grid):
        measured.append(at + 1)
        if noisy[grid[at + 1]] < 1.02 * noisy[grid[at]]:
            break
        at += 1
    while at == 2 and min(measured) > 0:
        measured.append(min(measured) - 1)
        if noisy[grid[min(measured)]] < 0.98 * noisy[grid[at]]:
            break
    return lines(profile, noisy, [grid[one] for one in measured])


Way = Callable[[Profile, Profile], Outcome]


def run_trials(way: Way, known: Mapping[str, Profile], seeds: int) -> dict[str, list[Outcome]]:
    outcomes: dict[str, list[Outcome]] = {name: [] for name in known}
    for name, profile in known.items():
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            noisy = {cores: rate * max(0.5, 1 + NOISE * rng.standard_normal()) for cores, rate in profile.items()}
            outcomes[name].append(way(profile, noisy))
    return outcomes


def flat(outcomes: Mapping[str, list[Outcome]], without: str = "") -> list[Outcome]:
    return [one for name, some in outcomes.items() if not without or name.split("_")[0] != without for one in some]


def mean(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> float:
    return statistics.fmean(map(figure, outcomes))


def curve_rows(seeds: int) -> Iterator[harness.Row]:
    known = profiles()
    if not known:
        print(f"no profiles in {DATA}: skipping the rows about cores", file=sys.stderr)
        return
    ours, halved, stepped = (run_trials(way, known, seeds) for way in (designed, halving, stepping))
    families = sorted({name.split("_")[0] for name in known})
    every, other = flat(ours), flat(halved)

    def near(outcomes: Sequence[Outcome]) -> float:
        return 100 * mean(outcomes, lambda one: one.steps_off <= 1)

    def wrong(outcomes: Sequence[Outcome]) -> float:
        return 100 * mean(outcomes, lambda one: one.error)

    def used(outcomes: Sequence[Outcome]) -> float:
        return mean(outcomes, lambda one: one.points)

    yield harness.Row("θ within a step", near(every), "%", near(other), "halving", "at least 90", near(every) >= 90)
    worst = min(near(flat(ours, family)) for family in families)
    yield harness.Row("… whichever family is left out", worst, "%", near(every), "all", "at least 90", worst >= 90)
    yield harness.Row(
        "mean error of the rate", wrong(every), "%", wrong(other), "halving", "at most 6", wrong(every) <= 6
    )
    worst = max(wrong(flat(ours, family)) for family in families)
    yield harness.Row("… whichever family is left out", worst, "%", wrong(every), "all", "at most 6", worst <= 6)
    median, beside = (100 * statistics.median(one.error for one in some) for some in (every, other))
    yield harness.Row("median error of the rate", median, "%", beside, "halving", "at most 4", median <= 4)
    worst = max(max(one.points for one in every), 0)
    yield harness.Row("most core counts measured", worst, "points", bar="at most 4", holds=worst <= POINTS)
    yield harness.Row("core counts measured", used(every), "points", used(other), "halving")
    steps = flat(stepped)
    bar = "fewer, and no larger an error"
    holds = used(every) < used(steps) and wrong(every) <= wrong(steps)
    yield harness.Row("core counts measured", used(every), "points", used(steps), "step by step", bar, holds)
    yield harness.Row("mean error of the rate", wrong(every), "%", wrong(steps), "step by step")
    yield _points_of_halving(known, seeds, used(every), wrong(every))
    covered = 100 * mean(every, lambda one: one.covered)
    yield harness.Row("θ within its interval of 90 %", covered, "%", 90.0, "promised")
    within, promised = 100 * mean(every, lambda one: one.within), 100 * mean(every, lambda one: one.confident)
    yield harness.Row("rates within 15 %", within, "%", promised, "mean confidence")


def _points_of_halving(known: Mapping[str, Profile], seeds: int, points: float, error: float) -> harness.Row:
    """Compare with the number of points that bisection needs for the same error."""
    for budget in range(2, len(CORES) + 1):
        outcomes = flat(run_trials(lambda profile, noisy, n=budget: halving(profile, noisy, n), known, min(seeds, 4)))  # type: ignore[misc]  # a lambda with a default
        if 100 * mean(outcomes, lambda one: one.error) <= error:
            break
    needed = mean(outcomes, lambda one: one.points)
    return harness.Row(
        "core counts measured", points, "points", needed, "halving, same error", "fewer", points < needed
    )


@dataclass(frozen=True, slots=True)
class Predicted:
    """The relative error and the confidence of a prediction."""

    error: float
    confidence: float


Times = dict[tuple[int, int], float]  # step seconds by GPUs and nodes


def pollux(model: Path) -> Iterator[tuple[Times, Times]]:
    """Yield, for each batch size per GPU, the three smallest placements and each of the others, up to 64 GPUs."""
    measured: dict[str, tuple[dict[str, float], list[tuple[tuple[int, int], float]]]] = {}
    for row in _csv(model / "placements.csv"):
        measured.setdefault(row["local_bsz"], ({}, []))[0][row["placement"]] = float(row["step_time"])
    for row in _csv(model / "scalability.csv"):
        if row["local_bsz"] in measured:
            place = int(row["num_replicas"]), int(row["num_nodes"])
            measured[row["local_bsz"]][1].append((place, float(row["step_time"])))
    for placements, far in measured.values():
        if {"1", "2", "11"} <= placements.keys():
            small = {(1, 1): placements["1"], (2, 1): placements["2"], (2, 2): placements["11"]}
            rest = [((sum(map(int, one)), len(one)), seconds) for one, seconds in placements.items() if len(one) > 0]
            for place, seconds in [*rest, *far]:
                if place not in small:
                    yield small, {place: seconds}


def elastic(table: Path) -> Iterator[tuple[Times, Times]]:
    """Yield, for each batch size, one, two and four GPUs of a node, and the others; 0 and nan mean not measured."""
    per_node = GPUS_PER_NODE[table.parent.name]
    for row in _csv(table):
        times = {
            (int(gpus), -(-int(gpus) // per_node)): 1 / float(rate)
            for gpus, rate in row.items()
            if gpus.isdigit() and rate and rate != "nan" and float(rate) > 0
        }
        places = sorted(times)
        yield {place: times[place] for place in places[:3]}, {place: times[place] for place in places[3:]}


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def predicted(pairs: Iterator[tuple[Times, Times]], cross: str) -> list[Predicted]:
    """Fit the small placements and predict the others; placements with the same small ones share a predictor."""
    found, fitted = [], dict[tuple[float, ...], Scaling]()
    for small, rest in pairs:
        predictor = fitted.setdefault(tuple(small.values()), Scaling(Scaling.Options(cross=cross)))  # type: ignore[arg-type]  # one of two
        if not predictor.dump():
            for (gpus, nodes), seconds in small.items():
                seen = Candidate(4, 1000, nodes)
                predictor.observe(Observation("a", "m", "", 1000 * gpus, gpus, seen, rate_per_second=1 / seconds))
            predictor.dump()
        for (gpus, nodes), seconds in rest.items():
            query = Query("a", "m", "", 1000 * gpus, gpus, candidates=(Candidate(4, 1000, nodes),))
            (judged,) = predictor.estimate(query).candidates
            found.append(Predicted(abs((judged.rate_per_second or 0.0) * seconds - 1), judged.confidence))
    return found


def scaling_rows() -> Iterator[harness.Row]:
    models = sorted((DATA / "pollux_profiles").glob("*/placements.csv"))
    tables = sorted((DATA / "elasticflow_profiles").glob("throughputs_*/*.csv"))
    if not (models and tables):
        print(f"no profiles in {DATA}: skipping the rows about GPUs", file=sys.stderr)
        return
    ours: dict[str, list[Predicted]] = {}
    genie: dict[str, list[Predicted]] = {}
    for cross, into in (("ring", ours), ("log", genie)):
        for path in models:
            into[f"Pollux {path.parent.name}"] = predicted(pollux(path.parent), cross)
        for path in tables:
            name = f"ElasticFlow {path.parent.name.removeprefix('throughputs_')} {path.stem}"
            into[name] = predicted(elastic(path), cross)
    for name, found in ours.items():
        yield harness.Row(f"{name}: median error", _median(found), "%", _median(genie[name]), "log₂ between nodes")
        yield harness.Row(f"{name}: within 15 %", _within(found), "%", _confidence(found), "mean confidence")
    every, other = ([one for some in into.values() for one in some] for into in (ours, genie))
    value = _median(every)
    yield harness.Row("scaling: median error of all", value, "%", _median(other), "log₂", "at most 10", value <= 10)
    sure = [one for one in every if one.confidence >= SURE]
    value = _median(sure)
    yield harness.Row("… of those that are sure", value, "%", _median(other), "log₂, all", "at most 10", value <= 10)
    unsure = [one for one in every if one.confidence < SURE]
    yield harness.Row("… of those that are not", _median(unsure), "%", value, "those that are sure")
    worst = 100 * len([one for one in sure if one.error > 0.5]) / len(sure)
    missed = 100 * len([one for one in unsure if one.error > 0.5]) / len(unsure)
    yield harness.Row("sure, and off by more than half", worst, "%", missed, "of the unsure")


def _median(found: Sequence[Predicted]) -> float:
    return 100 * statistics.median([one.error for one in found])


def _within(found: Sequence[Predicted]) -> float:
    return 100 * statistics.fmean(one.error <= 0.15 for one in found)


def _confidence(found: Sequence[Predicted]) -> float:
    return 100 * statistics.fmean(one.confidence for one in found)


TEAMS_MIN, WINDOWS = 6, 5  # minimum of teams per kind, so that five remain without one; windows per team
Team = tuple[int, int, float, float]  # workers, parameter servers, GPUs, cores of the job


def kinds() -> list[dict[Team, list[float]]]:
    """Return kinds of jobs (type and batch size) by team: the middle five rates of each team with at least five."""
    path = DATA / "aiturbo" / "ddl_jobs.csv"
    rates: dict[tuple[str, str], dict[Team, list[float]]] = {}
    for row in _csv(path) if path.exists() else ():
        if not all(row[name] for name in ("workers", "ps", "gpus", "cpus", "throughput")):
            continue
        team = int(float(row["workers"])), int(float(row["ps"])), float(row["gpus"]), float(row["cpus"])
        if min(team[:2]) > 0 and float(row["throughput"]) > 0:
            teams = rates.setdefault((row["job_type"], row["batch_size"]), {})
            teams.setdefault(team, []).append(float(row["throughput"]))
    middle = [
        {
            team: sorted(some)[(len(some) - WINDOWS) // 2 :][:WINDOWS]
            for team, some in teams.items()
            if len(some) >= WINDOWS
        }
        for teams in rates.values()
    ]
    return [teams for teams in middle if len(teams) >= TEAMS_MIN]


def team_rows() -> Iterator[harness.Row]:
    found: list[Predicted] = []
    for teams in kinds():
        for left_out, rates in teams.items():
            predictor = ParameterServer()
            for team in teams:
                for rate in teams[team] if team != left_out else ():
                    replicas, gpu_milli, seen = _allocation(team)
                    predictor.observe(Observation("a", "m", "", gpu_milli, replicas, seen, rate_per_second=rate))
            replicas, gpu_milli, asked = _allocation(left_out)
            (judged,) = predictor.estimate(Query("a", "m", "", gpu_milli, replicas, candidates=(asked,))).candidates
            error = abs((judged.rate_per_second or 0.0) / statistics.median(rates) - 1)
            found.append(Predicted(error, judged.confidence))
    sure, unsure = ([one for one in found if (one.confidence >= SURE) == side] for side in (True, False))
    if not (sure and unsure):
        print(f"no production jobs in {DATA}: skipping the rows about parameter servers", file=sys.stderr)
        return
    yield harness.Row("parameter-server: teams told surely", len(sure), "teams", len(unsure), "unsure")
    yield harness.Row("… their median error", _median(sure), "%", _median(unsure), "unsure")
    yield harness.Row("… within 15 %", _within(sure), "%", _within(unsure), "unsure")


def _allocation(team: Team) -> tuple[int, int, Candidate]:
    workers, servers, gpus, cores = team
    return workers + servers, round(1000 * gpus), Candidate(int(cores), workers=workers, servers=servers)


def _measure(quick: bool) -> Sequence[harness.Row]:
    return [*curve_rows(SEEDS_QUICK if quick else SEEDS), *scaling_rows(), *team_rows()]


if __name__ == "__main__":
    harness.main(_measure, __doc__ or "")
