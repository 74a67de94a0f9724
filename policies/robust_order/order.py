"""The robust order: what is known of a job, however much that is, decides its level.

Two votes are cast on each job. One knows only its age and its GPUs, the other also the prediction of its run time. Each
vote is the expected service per end, 1 / Gittins' index (`gittins_index`). The vote by predictions counts as much as
predictions have earned: every job that ends is first used to judge both models, and only then learned from. With
R² = 1 - squared error with predictions / squared error without, the weight of that vote is 0 up to `TRUST_FROM` and 1
from `TRUST_FULL` on. A job without a prediction has one vote.

Levels are as wide as ranks are uncertain: a factor of 3, down to 1.5 for predicted jobs if predictions explain nearly
everything. They are laid so that a new job of one GPU without a prediction is in the last third of its level: where
ranks grow with age, older jobs soon leave that level to it. If it were at the beginning of the level, they would keep
it waiting until their rank is three times its own. Within a level running jobs stay, then the first to arrive is first.

Everything learned is a function of the jobs that ended, in order; the hazard also counts the jobs in the table, as they
were at the last tick. So another leader, or a simulation, orders the same jobs in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cotenant.core.model.job_table import Floats, Ints, Jobs
from cotenant.core.policy.protocols import EndedJob
from cotenant.core.scheduling.attained_service import CROSSING_SECONDS, attained_at, gpus_charged, soonest
from cotenant.policies.robust_order import gittins_index
from cotenant.policies.robust_order.run_time_model import RunTimeModel
from cotenant.policies.robust_order.scale import PER_OCTAVE, ends_of, quarter_octaves, rounded_quarter_octaves

WINDOW, PRIOR_WORTH = 150, 40.0  # of the ended jobs that count, and of the prior, in jobs
FIT_EVERY, FIT_EVERY_FIRST, FIRST = 10, 5, 40  # ends between two fits; fewer at first
PRIOR_RUN_SECONDS = 7200.0
PRIOR_UNKNOWN: Floats = np.linspace(-3.2, 3.2, 33)  # log-uniform: 5 minutes to 2 days around 2 hours
PRIOR_PREDICTED: Floats = np.concatenate([np.linspace(-0.8, 0.8, 30), [-2.5, 1.5, 2.5]])  # a few are far off
ERROR_MAX, ERRORS_FIRST, ERRORS_KEPT = 9.0, 5.0, 0.995  # of squared errors: cap, first sums, and decay per end
TRUST_FROM, TRUST_FULL = 0.3, 0.7  # of R²
PART = 8192  # rows
TRUST_BITS = 10  # of the weight, as an integer
TRUST_UNIT = 1 << TRUST_BITS
SHARP_FROM, SHARP_FULL = 0.8, 0.95
WIDTH, WIDTH_SHARP = PER_OCTAVE * math.log2(3.0), PER_OCTAVE * math.log2(1.5)  # of a level, in quarter octaves
NEWCOMER = 2.0  # quarter octaves from a new job's rank to the end of its level
GRID = 2  # levels of different widths are compared on a grid of half a quarter octave
SECONDS_MIN, GPUS_MIN, GPUS_MAX = 64.0, 0.25, 2.0**13
RUN_SECONDS_MAX = 1e9
CORES_PER_GPU = 3.0

YOUNGEST = int(quarter_octaves(np.array([SECONDS_MIN]))[0])
SMALLEST = int(quarter_octaves(np.array([GPUS_MIN]))[0])
SIZES: Ints = np.arange(SMALLEST, int(quarter_octaves(np.array([GPUS_MAX]))[0]) + 1)
OCTAVES = 26  # of age
AGES: Ints = np.arange(YOUNGEST, YOUNGEST + OCTAVES * PER_OCTAVE)
RANKS = 60 * PER_OCTAVE  # the lowest rank is -RANKS, the highest RANKS


class RobustOrder:
    """Orders jobs, and learns from those that end. See the module docstring."""

    def __init__(self, confidence_min: float) -> None:
        self._confidence_min = confidence_min
        self._unknown = RunTimeModel((math.log(PRIOR_RUN_SECONDS), 0.0), WINDOW, PRIOR_WORTH)
        self._predicted = RunTimeModel((0.0, 0.0, 1.0), WINDOW, PRIOR_WORTH)
        self._errors_unknown = self._errors_predicted = ERRORS_FIRST
        self._ended = 0
        self._fitted()

    # Learning ----------------------------------------------------------------------------------------------------

    def learn(self, ended: EndedJob) -> None:
        """Judge the models by a job that ended, and learn from it; an impossible run time is ignored."""
        if not 0 < ended.attained_seconds <= RUN_SECONDS_MAX:
            return
        gpus = ended.gpu_milli / 1000 if ended.gpu_milli else ended.cores / CORES_PER_GPU
        features = 1.0, math.log(min(max(gpus, GPUS_MIN), GPUS_MAX))
        log_run_time = math.log(max(ended.attained_seconds, 1.0))
        predicted = ended.predicted_seconds or 0.0
        if ended.confidence >= self._confidence_min and 0 < predicted < math.inf:
            told = *features, math.log(min(max(predicted, 1.0), RUN_SECONDS_MAX))
            error = min(self._predicted.squared_error(told, log_run_time), ERROR_MAX)
            self._errors_predicted = self._errors_predicted * ERRORS_KEPT + error
            error = min(self._unknown.squared_error(features, log_run_time), ERROR_MAX)
            self._errors_unknown = self._errors_unknown * ERRORS_KEPT + error
            self._predicted.learn(told, log_run_time)
        self._unknown.learn(features, log_run_time)
        self._ended += 1
        if self._ended % (FIT_EVERY_FIRST if self._ended <= FIRST else FIT_EVERY) == 0:
            self._unknown.fit()
            self._predicted.fit()
            self._fitted()

    @property
    def explained(self) -> float:
        """The share of the squared error of log run time that predictions take away; below 0 they mislead."""
        return 1 - self._errors_predicted / self._errors_unknown

    @property
    def trust(self) -> float:
        """The weight of the vote by predictions, from 0 to 1."""
        return _between(TRUST_FROM, TRUST_FULL, self.explained)

    # The order ---------------------------------------------------------------------------------------------------

    def levels(self, jobs: Jobs, now: float, tick: float) -> tuple[Ints, float, Callable[[int], Mapping[str, float]]]:
        """Return the jobs' levels as of the last tick, the moment from which they may differ, and each row's votes."""
        attained = jobs.attained_seconds + CROSSING_SECONDS
        running = np.flatnonzero(jobs.running)
        attained[running] = attained_at(jobs, now, tick, running) + CROSSING_SECONDS
        ages = quarter_octaves(np.maximum(attained, SECONDS_MIN)) - YOUNGEST
        older = ends_of(ages[running] + YOUNGEST) - attained[running]
        np.minimum(ages, len(AGES) - 1, out=ages)
        gpus = gpus_charged(jobs, CORES_PER_GPU)
        np.minimum(np.maximum(gpus, GPUS_MIN, out=gpus), GPUS_MAX, out=gpus)
        sizes = quarter_octaves(gpus) - SMALLEST
        cells = sizes * len(AGES)
        cells += ages
        self._censor_unknown(cells)
        level = self._levels_unknown.take(cells)
        ranks, trust = self._ranks_unknown, self.trust
        confidence, predicted = jobs.confidence, jobs.predicted_seconds

        def votes(row: int) -> Mapping[str, float]:
            by_age = {"expected GPU-seconds by age": 2.0 ** (int(ranks[cells[row]]) / PER_OCTAVE)}
            if confidence[row] < self._confidence_min or not predicted[row] > 0:
                return by_age
            return {**by_age, "weight of its prediction": trust}

        if trust > 0:
            rows = np.flatnonzero((confidence >= self._confidence_min) & (predicted > 0))
            self._set_levels(level, predicted, sizes, ages, cells, rows)
        return level, soonest(np.maximum(jobs.running_since[running], tick) + older), votes

    def _set_levels(self, level: Ints, predicted: Floats, sizes: Ints, ages: Ints, cells: Ints, rows: Ints) -> None:
        """Set the levels of some rows, which have a prediction; part by part, as that stays within a core's cache."""
        parts = [rows[begin : begin + PART] for begin in range(0, len(rows), PART)]
        placed = [self._relative_ages(predicted.take(part), sizes.take(part), ages.take(part)) for part in parts]
        self._censor_predicted([censored for _, _, censored in placed])
        for part, (typical, relative, _) in zip(parts, placed, strict=True):
            rank = self._index_predicted.take(relative)
            rank += typical
            rank += SIZES.take(sizes.take(part))
            if (trust := self.trust) < 1:
                other = self._ranks_unknown.take(cells.take(part))
                rank = other + ((rank - other) * round(trust * TRUST_UNIT) >> TRUST_BITS)
            level[part] = self._level_of_predicted.take(_place_of(rank))

    def _relative_ages(self, predicted: Floats, sizes: Ints, ages: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the steps of typical run times and of relative ages, and the relative ages of jobs that have run."""
        np.minimum(np.maximum(predicted, 1.0, out=predicted), RUN_SECONDS_MAX, out=predicted)
        typical = self._typical_by_prediction.take(quarter_octaves(predicted))
        typical += self._typical_by_size.take(sizes)
        relative = gittins_index.clipped_steps(ages + YOUNGEST - typical)
        return typical, relative, relative[ages >= PER_OCTAVE] // PER_OCTAVE

    # Tables ------------------------------------------------------------------------------------------------------

    def _fitted(self) -> None:
        """Make the tables that follow from the fit alone; those that also count active jobs are made when needed."""
        ones = np.ones(len(SIZES))
        log_sizes = SIZES * (math.log(2.0) / PER_OCTAVE)
        self._typical_unknown = rounded_quarter_octaves(self._unknown.typical(np.stack([ones, log_sizes], 1)))
        base, by_gpus, by_prediction = self._predicted.coefficients.tolist()
        log_predicted = (np.arange(31 * PER_OCTAVE) + 0.5) * (math.log(2.0) / PER_OCTAVE)  # the middle of each step
        self._typical_by_prediction = rounded_quarter_octaves(base + by_prediction * log_predicted)
        self._typical_by_size = rounded_quarter_octaves(by_gpus * log_sizes)
        self._ends_unknown = _ends(self._unknown, PRIOR_UNKNOWN)
        self._ends_predicted = _ends(self._predicted, PRIOR_PREDICTED)
        self._censored_unknown = self._censored_predicted = b""

    def _censor_unknown(self, cells: Ints) -> None:
        """Count the active jobs, by size and octave of age, in the hazard of jobs without predictions."""
        octaves = np.bincount(cells // PER_OCTAVE, minlength=len(SIZES) * OCTAVES).reshape(len(SIZES), OCTAVES)
        octaves[:, 0] = 0  # jobs that have not run yet, or hardly, say nothing
        if (key := octaves.tobytes()) == self._censored_unknown:
            return
        self._censored_unknown = key
        sizes, octave = np.nonzero(octaves)
        steps = YOUNGEST + octave * PER_OCTAVE + PER_OCTAVE // 2 - self._typical_unknown[sizes]
        places = gittins_index.clipped_steps(steps)
        censored = np.bincount(places, weights=octaves[sizes, octave], minlength=gittins_index.STEPS)
        index = _in_quarter_octaves(self._ends_unknown, censored)
        typical = self._typical_unknown[:, None]
        ranks = index[gittins_index.clipped_steps(AGES - typical)] + typical + SIZES[:, None]
        self._ranks_unknown = ranks.ravel()
        newcomer = int(self._ranks_unknown[-SMALLEST * len(AGES)])  # one GPU, and the first age
        self._level_of_unknown = _level_of(WIDTH, newcomer)
        sharp = _between(SHARP_FROM, SHARP_FULL, self.explained)
        self._level_of_predicted = _level_of(WIDTH + sharp * (WIDTH_SHARP - WIDTH), newcomer)
        self._levels_unknown = self._level_of_unknown[_place_of(self._ranks_unknown)]

    def _censor_predicted(self, relative: Sequence[Ints]) -> None:
        """Count the active jobs with a prediction, by the octave of relative age, in the hazard of those jobs."""
        octaves = np.zeros(gittins_index.STEPS // PER_OCTAVE + 1, dtype=np.int64)
        for some in relative:
            octaves += np.bincount(some, minlength=len(octaves))
        if (key := octaves.tobytes()) == self._censored_predicted:
            return
        self._censored_predicted = key
        places = np.minimum(np.arange(len(octaves)) * PER_OCTAVE + PER_OCTAVE // 2, gittins_index.STEPS - 1)
        censored = np.bincount(places, weights=octaves, minlength=gittins_index.STEPS)
        self._index_predicted = _in_quarter_octaves(self._ends_predicted, censored)


def _between(least: float, most: float, value: float) -> float:
    return min(1.0, max(0.0, (value - least) / (most - least)))


def _ends(model: RunTimeModel, prior: Floats) -> Floats:
    """Return the ends at each step of relative age: those of remembered jobs, and of the prior."""
    features, log_run_times = model.ended()
    ended = np.zeros(gittins_index.STEPS)
    if len(features):
        typical = rounded_quarter_octaves(model.typical(features))
        ended = gittins_index.counted(quarter_octaves(np.exp(log_run_times)) - typical)
    before = gittins_index.counted(rounded_quarter_octaves(prior))
    return gittins_index.smoothed(ended) + PRIOR_WORTH / len(prior) * before


def _in_quarter_octaves(ended: Floats, censored: np.ndarray) -> Ints:
    return rounded_quarter_octaves(np.log(gittins_index.seconds_per_end(ended, censored)))


def _place_of(ranks: Ints) -> Ints:
    """Return the places of ranks in a table from -RANKS to RANKS."""
    places: Ints = np.minimum(np.maximum(ranks, -RANKS), RANKS) + RANKS
    return places


def _level_of(width: float, newcomer: int) -> Ints:
    """Return the level of each rank from -RANKS to RANKS: the middle of the level, on the grid; it is 0 or more."""
    begin = newcomer + NEWCOMER - width  # of the newcomer's level
    middle = (np.floor((np.arange(-RANKS, RANKS + 1) - begin) / width) + 0.5) * width + begin
    levels: Ints = np.rint((middle + 2 * RANKS) * GRID).astype(np.int64)
    return levels
