"""A model of run times: quantiles of the logarithm of a job's run time, from the facts of its submission.

Theory of operation. `train` replays finished jobs in order of time: each is described by its request and by the figures
that `recurrence` had about similar jobs at its submission, so that no figure uses the future. Gradient boosting (Ke et
al., LightGBM, NIPS 2017 [P]) with the pinball loss (Koenker & Bassett, 1978 [P]) then learns three things.

- *Corrections*: for the 10th, 50th and 90th percentile, how far a job lies from the percentile of similar jobs, by its
  request. A tree has to learn only the differences, and where it knows nothing the group decides [R].
- *Trends*: the percentiles themselves, also by the outcomes of the latest similar jobs: jobs come in sweeps, and jobs
  that were submitted together end alike [R].
- *A mixture*: many jobs end long before their time (a wrong path, a crash, a user who sees that it will not work), the
  others take about as long as always. One classifier learns the probability of a surprise, three boosters learn the
  percentiles of jobs without one, and the distribution of surprises is that of all of them. The percentiles of the
  mixture are read from its distribution function [R]. The classifier learns from few jobs what a 10th percentile, which
  jumps where the probability crosses 10 %, learns from many.

Which of the three is best differs from cluster to cluster and from day to day: see `blending`. Everything is
deterministic: one thread, fixed seeds, no sampling.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.core.model.job_table import Floats
from cotenant.core.prediction import record_validation as kept
from cotenant.policies.lightgbm_duration.blending import SHARES
from cotenant.policies.lightgbm_duration.finished_jobs import End, Facts
from cotenant.policies.lightgbm_duration.recurrence import ENDED, FIGURES, LEVELS, LONGER, SUBMITTED, RecurrenceTable

if TYPE_CHECKING:
    from lightgbm import Booster

COLUMNS_MAX, WORDS_MAX, WORD_ENDS_MIN = 40, 64, 5
ROWS_MAX = 30_000  # the latest ends used for training
ROUNDS = 80
TREES_COUNT = 10
SURPRISES_MIN = 5  # minimum on either side for training a classifier
TREES: Mapping[str, Any] = {
    "learning_rate": 0.1,
    "num_leaves": 15,
    "min_data_in_leaf": 10,
    "min_data_per_group": 5,
    "cat_smooth": 2.0,
    "cat_l2": 1.0,
    "max_bin": 127,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 1,
    "verbose": -1,
}
KIND, LIKE = LEVELS.index("kind"), LEVELS.index("like")
TREND_LEVELS = [LEVELS.index(level) for level in ("like", "submitter", "kind")]
FALLBACKS = tuple(LEVELS.index(level) for level in ("like", "kind", "size", "submitter", "all"))
LOG_SECONDS_MAX = 100.0  # larger than the distance of any two run times
HALVINGS = 14  # of a range of about ten logarithms, down to a thousandth
KNOTS = np.linspace(0.0, 1.0, 21)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes facts and figures as a row of numbers; training selects which facts get a column."""

    numbers: tuple[str, ...]
    words: tuple[tuple[str, tuple[str, ...]], ...]  # a field, and its most common words

    @classmethod
    def of(cls, all_facts: Sequence[Facts]) -> Encoder:
        """Select columns: the most common fields, as words if most of their values are words."""
        seen: dict[str, Counter[float | str]] = {}
        for facts, count in Counter(all_facts).items():
            for name, value in facts:
                seen.setdefault(name, Counter())[value] += count
        telling = [name for name, values in seen.items() if len(values) > 1]
        commonest = sorted(telling, key=lambda name: (-seen[name].total(), name))[:COLUMNS_MAX]
        wordy = [name for name in commonest if _mostly_words(seen[name])]
        vocabularies = tuple((name, _vocabulary(seen[name])) for name in wordy)
        numbers = [name for name in commonest if name not in wordy]
        return cls(tuple(numbers or ["gpus"]), vocabularies)  # trees need a column, even an uninformative one

    @property
    def width(self) -> int:
        """Number of columns of the request; quantiles of similar jobs follow, then the trends."""
        return len(self.numbers) + len(self.words)

    @property
    def categories(self) -> list[int]:
        """The columns that hold categories."""
        return list(range(len(self.numbers), len(self.numbers) + len(self.words)))

    def matrix(self, all_facts: Sequence[Facts], submitted: Floats, rows: Floats) -> Floats:
        """Return one row for each job."""
        told = np.full((len(all_facts), self.width), np.nan)
        place = {name: column for column, name in enumerate(self.numbers)}
        codes = {name: {word: code for code, word in enumerate(words)} for name, words in self.words}
        columns = {name: len(self.numbers) + column for column, (name, _) in enumerate(self.words)}
        known: dict[Facts, int] = {}
        for row, facts in enumerate(all_facts):
            like = known.setdefault(facts, row)
            if like != row:
                told[row] = told[like]
                continue
            for name, value in facts:
                if name in codes:
                    told[row, columns[name]] = codes[name].get(str(value), np.nan)
                elif name in place and isinstance(value, float):
                    told[row, place[name]] = value
        figures = rows.copy()
        with np.errstate(invalid="ignore"):
            for past in (ENDED, SUBMITTED):
                figures[:, :, past] = np.log1p(np.maximum(0.0, submitted[:, None] - rows[:, :, past]))
            hour, day = submitted / 3600 % 24, submitted // 86_400 % 7
        return np.column_stack(
            [told, group_quantiles(rows, LONGER), hour, day, figures[:, TREND_LEVELS].reshape(len(rows), -1)]
        )


def _mostly_words(values: Counter[float | str]) -> bool:
    return 2 * sum(count for value, count in values.items() if isinstance(value, str)) > values.total()


def _vocabulary(values: Counter[float | str]) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for value, count in values.items():
        counts[str(value)] += count
    common = sorted((word for word in counts if counts[word] >= WORD_ENDS_MIN), key=lambda word: (-counts[word], word))
    return tuple(common[:WORDS_MAX])


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Finished jobs as described at their submission, and their outcomes."""

    facts: Sequence[Facts]
    submitted: Floats
    rows: Floats
    log_run: Floats
    surprising: Floats  # NaN if unknown


def replay(ends: Sequence[End], rows_max: int = ROWS_MAX) -> TrainingSet:
    """Replay finished jobs in order of time, each with what was known of similar jobs at its submission.

    A job without a submission time is assumed to follow all jobs that ended before it.
    """
    order = sorted(range(len(ends)), key=lambda index: (ends[index].ended_seconds, index))
    begun = [
        ends[index].ended_seconds if math.isnan(ends[index].submitted_seconds) else ends[index].submitted_seconds
        for index in range(len(ends))
    ]
    kept = sorted(order[-rows_max:], key=lambda index: (begun[index], index))
    table, rows, next_end = RecurrenceTable(), np.empty((len(kept), len(LEVELS), len(FIGURES))), 0
    surprising: dict[int, bool | None] = {}

    def learn_until(seconds: float) -> None:
        nonlocal next_end
        while next_end < len(order) and ends[order[next_end]].ended_seconds <= seconds:
            index = order[next_end]
            if index == waiting:
                break
            surprising[index] = table.surprising(ends[index])
            table.learn(ends[index])
            next_end += 1

    for row, waiting in enumerate(kept):
        learn_until(begun[waiting])
        rows[row] = table.rows(table.slots(ends[waiting].facts))
    waiting = -1
    learn_until(math.inf)
    odd = [surprising[index] for index in kept]
    return TrainingSet(
        facts=[ends[index].facts for index in kept],
        submitted=np.array([begun[index] for index in kept]),
        rows=rows,
        log_run=np.log([ends[index].run_seconds for index in kept]),
        surprising=np.array([np.nan if told is None else float(told) for told in odd]),
    )


def group_quantiles(rows: Floats, which: slice) -> Floats:
    """Return the quantiles of the closest level with any; NaN if nothing was ever observed."""
    found = rows[:, FALLBACKS[0], which].copy()
    for level in FALLBACKS[1:]:
        missing = np.isnan(found[:, 0])
        if not missing.any():
            break
        found[missing] = rows[missing, level, which]
    return found


@dataclass(frozen=True)
class Model:
    """A trained model: predicts quantiles, in logarithms of seconds, from facts and figures."""

    version: int
    ends: int  # number of training ends
    seen: int  # ends seen by then
    encoder: Encoder
    trees: tuple[str, ...]  # three corrections, three trends, three quantiles without surprises, surprises
    surprises: tuple[float, ...]  # quantiles of the distance of surprises from the median of their class
    surprises_share: float  # used where there are too few to learn from; the last tree is empty then

    @cached_property
    def _boosters(self) -> list[Booster]:
        from lightgbm import Booster  # half a second and 60 MiB: only if used

        return [Booster(model_str=text) for text in self.trees if text]

    def load(self) -> None:
        """Load the trees, which takes a while."""
        assert self._boosters

    @property
    def is_of_its_columns(self) -> bool:
        """Whether the trees have as many columns as their inputs."""
        width, own = self.encoder.width, [booster.num_feature() for booster in self._boosters]
        trends = set(own[3:6])
        return own[:3] == [width + 3] * 3 and set(own[6:]) == {width} and len(trends) == 1 and min(trends) > width + 3

    def predict(self, facts: Sequence[Facts], submitted: Floats, rows: Floats) -> tuple[Floats, Floats]:
        """Return quantiles by three models, (jobs, 3 models, 3 quantiles), and the probability of a surprise."""
        described = self.encoder.matrix(facts, submitted, rows)
        views = [self.encoder.width + extra for extra in (3, described.shape[1], 0, 0)]
        told = [
            _predicted(booster, described[:, : views[number // 3]]) for number, booster in enumerate(self._boosters)
        ]
        probability = told[9] if self.trees[9] else np.full(len(facts), self.surprises_share)
        corrected = group_quantiles(rows, LONGER) + np.column_stack(told[:3])
        trends = np.column_stack(told[3:6])
        plain = np.sort(np.column_stack(told[6:9]), axis=1)
        mixed = mixture(plain, np.array(self.surprises), probability) + _middle(rows)[:, None]
        return np.sort(np.stack([corrected, trends, mixed], axis=1), axis=2), probability

    def __getstate__(self) -> dict[str, object]:
        """Pickle without the loaded trees."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def parts(self, bytes_max: int) -> Sequence[bytes]:
        """Encode the model in parts of a size that a store accepts."""
        whole = self._dumped
        return [whole[start : start + bytes_max] for start in range(0, len(whole), bytes_max)]

    @cached_property
    def _dumped(self) -> bytes:
        """The encoded model."""
        figures = {name: getattr(self, name) for name in ("version", "ends", "seen", "surprises", "surprises_share")}
        columns = {"numbers": self.encoder.numbers, "words": self.encoder.words}
        return zlib.compress(json.dumps({**figures, **columns, "trees": self.trees}).encode(), 6)


def _predicted(booster: Booster, described: Floats) -> Floats:
    return np.asarray(booster.predict(described, num_threads=1), dtype=np.float64)


def _middle(rows: Floats) -> Floats:
    """Return the median of a job's class, the reference of surprises."""
    kind, everybody = rows[:, KIND, LONGER.start + 1], rows[:, -1, LONGER.start + 1]
    found: Floats = np.where(np.isnan(kind), everybody, kind)
    return found


def mixture(plain: Floats, surprises: Floats, probability: Floats) -> Floats:
    """Return quantiles of the mixture of ordinary and surprising jobs, by bisection.

    The ordinary jobs' distribution function is linear between its three quantiles, and falls off beyond them within the
    same distance.
    """
    low, middle, high = plain.T
    knots = np.column_stack([low - (middle - low) - 1e-3, low, middle, high, high + (high - middle) + 1e-3])
    heights = np.array([0.0, *SHARES, 1.0])
    bottom = np.minimum(knots[:, 0], surprises[0])[:, None] + np.zeros(3)
    top = np.maximum(knots[:, -1], surprises[-1])[:, None] + np.zeros(3)
    for _ in range(HALVINGS):
        at = (bottom + top) / 2
        below = probability[:, None] * np.interp(at, surprises, KNOTS)
        below += (1 - probability[:, None]) * _heights(at, knots, heights)
        above = below >= SHARES
        top, bottom = np.where(above, at, top), np.where(above, bottom, at)
    read: Floats = (bottom + top) / 2
    return read


def _heights(at: Floats, knots: Floats, heights: Floats) -> Floats:
    """Interpolate in each row's own distribution function."""
    reached = np.zeros_like(at)
    for place in range(len(heights) - 1):
        left, right = knots[:, place, None], knots[:, place + 1, None]
        share = np.minimum(np.maximum((at - left) / np.maximum(right - left, 1e-9), 0.0), 1.0)
        reached += share * (heights[place + 1] - heights[place])
    return reached


def read_model(content: bytes) -> Model:
    """Decode a model written by `Model.parts`, including its trees.

    Raises:
        ValueError: the content is not a valid model.
    """
    try:
        told = json.loads(zlib.decompress(content))
        words = tuple((str(name), tuple(str(word) for word in known)) for name, known in told["words"])
        model = Model(
            version=kept.whole(told["version"], 0, kept.STEPS_MAX),
            ends=kept.whole(told["ends"], 0, kept.STEPS_MAX),
            seen=kept.whole(told["seen"], 0, kept.STEPS_MAX),
            encoder=Encoder(tuple(str(name) for name in told["numbers"]), words),
            trees=tuple(str(text) for text in told["trees"]),
            surprises=tuple(kept.between(figure, -LOG_SECONDS_MAX, LOG_SECONDS_MAX) for figure in told["surprises"]),
            surprises_share=kept.between(told["surprises_share"], 0.0, 1.0),
        )
        if len(model.trees) != TREES_COUNT or not all(model.trees[:-1]) or len(model.surprises) != len(KNOTS):
            raise ValueError("parts of the model are missing")
        model.load()
        if not model.is_of_its_columns:
            raise ValueError("its trees have a different number of columns")
    except (zlib.error, TypeError, KeyError, AttributeError, OverflowError, RecursionError, _broken()) as error:
        raise ValueError(f"invalid model: {error}") from None
    return model


def _broken() -> type[Exception]:
    """Return the error LightGBM raises for unreadable trees."""
    from lightgbm.basic import LightGBMError

    return LightGBMError


def train(ends: Sequence[End], version: int, seen: int) -> Model:
    """Train on finished jobs; a pure function of them. A useful model needs several hundred."""
    lessons = replay(ends)
    groups = group_quantiles(lessons.rows, LONGER)
    usable = ~np.isnan(groups[:, 0])
    encoder = Encoder.of(lessons.facts)
    coarse = {"min_data_in_leaf": int(np.clip(len(ends) / 250, 10, 40)), "num_leaves": 31}
    described = encoder.matrix(lessons.facts, lessons.submitted, lessons.rows)
    from_middle = lessons.log_run - _middle(lessons.rows)
    plain, judged = usable & ~(lessons.surprising == 1), usable & ~np.isnan(lessons.surprising)
    fit_trees = _TreeTrainer(described, encoder.categories)
    trees = []
    fit_trees = _TreeTrainer(described[:, : encoder.width + 3], encoder.categories)
    trees += [fit_trees(usable, lessons.log_run - groups[:, place], alpha=share) for place, share in enumerate(SHARES)]
    fit_trees = _TreeTrainer(described, encoder.categories)
    trees += [fit_trees(usable, lessons.log_run, alpha=share, **coarse) for share in SHARES]
    fit_trees = _TreeTrainer(described[:, : encoder.width], encoder.categories)
    trees += [fit_trees(plain if plain.any() else usable, from_middle, alpha=share) for share in SHARES]
    odd = lessons.surprising[judged]
    trees.append(fit_trees(judged, lessons.surprising) if min(odd.sum(), len(odd) - odd.sum()) >= SURPRISES_MIN else "")
    far = from_middle[usable & (lessons.surprising == 1)]
    surprises = np.quantile(far, KNOTS) if len(far) else np.linspace(-1e-3, 1e-3, len(KNOTS))
    share = (odd.sum() + 1) / (len(odd) + 2)
    return Model(version, len(ends), seen, encoder, tuple(trees), tuple(float(one) for one in surprises), float(share))


class _TreeTrainer:
    """Trains trees on one description of jobs."""

    def __init__(self, described: Floats, categories: list[int]) -> None:
        self._described, self._categories = described, categories

    def __call__(self, rows: Any, target: Floats, alpha: float | None = None, **more: Any) -> str:
        import lightgbm

        aim = {"objective": "binary"} if alpha is None else {"objective": "quantile", "alpha": float(alpha)}
        taught = lightgbm.Dataset(self._described[rows], target[rows], categorical_feature=self._categories)
        return str(lightgbm.train({**TREES, **aim, **more}, taught, ROUNDS).model_to_string())
