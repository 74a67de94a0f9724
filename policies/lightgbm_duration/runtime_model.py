"""A model of run times: quantiles of the logarithm of how long a job will run, from what its submission tells.

Theory of operation. `train` replays finished jobs in the order of time: each is described by what it asked for and by
the figures that `recurrence` had about its like when it was submitted, so that no figure knows the future. Gradient
boosting (Ke et al., LightGBM, NIPS 2017 [P]) with the pinball loss (Koenker & Bassett, 1978 [P]) then learns three
things.

- *Corrections*: for the 10th, 50th and 90th percentile, how far a job lies from the percentile of those that were like
  it, by what it asked for. A tree has to learn only what differs, and where it knows nothing the group speaks [R].
- *Trends*: the percentiles themselves, by what became of the latest of its like as well: jobs come in sweeps, and
  those that were submitted together end alike [R].
- *A mixture*: many jobs end long before their time (a wrong path, a crash, a user who sees that it will not do), the
  others take about as long as ever. One classifier learns how probable a surprise is, three boosters learn the
  percentiles of jobs without one, and the distribution of surprises is that of all of them. The percentiles of the
  mixture are read off its distribution function [R]. The classifier learns from few jobs what a 10th percentile,
  which jumps where the probability crosses 10 %, learns from many.

Which of the three to listen to differs from cluster to cluster and from day to day: see `blending`. Everything is
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
from cotenant.policies.lightgbm_duration.recurrence import ENDED, FIGURES, LEVELS, LONGER, SUBMITTED, Memories

if TYPE_CHECKING:
    from lightgbm import Booster

COLUMNS_MAX, WORDS_MAX, WORD_ENDS_MIN = 40, 64, 5
ROWS_MAX = 30_000  # the latest ends that trees are grown from
ROUNDS = 80
TREES_COUNT = 10
SURPRISES_MIN = 5  # on either side, for a classifier to be learnt
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
LOG_SECONDS_MAX = 100.0  # no two run times are so far apart
HALVINGS = 14  # of a range of some ten logarithms, down to a thousandth
KNOTS = np.linspace(0.0, 1.0, 21)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns facts and figures into a row of numbers; which facts are worth a column was seen in training."""

    numbers: tuple[str, ...]
    words: tuple[tuple[str, tuple[str, ...]], ...]  # a field, and its commonest words

    @classmethod
    def of(cls, all_facts: Sequence[Facts]) -> Encoder:
        """Choose columns: the fields that occur most, words among them where most of what stands there is words."""
        seen: dict[str, Counter[float | str]] = {}
        for facts, count in Counter(all_facts).items():
            for name, value in facts:
                seen.setdefault(name, Counter())[value] += count
        telling = [name for name, values in seen.items() if len(values) > 1]
        commonest = sorted(telling, key=lambda name: (-seen[name].total(), name))[:COLUMNS_MAX]
        wordy = [name for name in commonest if _wordy(seen[name])]
        vocabularies = tuple((name, _vocabulary(seen[name])) for name in wordy)
        numbers = [name for name in commonest if name not in wordy]
        return cls(tuple(numbers or ["gpus"]), vocabularies)  # trees need a column, if only to see that it says nothing

    @property
    def width(self) -> int:
        """Columns that tell what was asked for; behind them stand the quantiles of the job's like, then the trends."""
        return len(self.numbers) + len(self.words)

    @property
    def categories(self) -> list[int]:
        """The columns that hold categories."""
        return list(range(len(self.numbers), len(self.numbers) + len(self.words)))

    def matrix(self, all_facts: Sequence[Facts], submitted: Floats, rows: Floats) -> Floats:
        """Describe jobs: one row each."""
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


def _wordy(values: Counter[float | str]) -> bool:
    return 2 * sum(count for value, count in values.items() if isinstance(value, str)) > values.total()


def _vocabulary(values: Counter[float | str]) -> tuple[str, ...]:
    counts: Counter[str] = Counter()
    for value, count in values.items():
        counts[str(value)] += count
    common = sorted((word for word in counts if counts[word] >= WORD_ENDS_MIN), key=lambda word: (-counts[word], word))
    return tuple(common[:WORDS_MAX])


@dataclass(frozen=True, slots=True)
class Lessons:
    """Finished jobs as they were described at their submission, and what came of them."""

    facts: Sequence[Facts]
    submitted: Floats
    rows: Floats
    log_run: Floats
    surprising: Floats  # NaN where nobody can tell


def replay(ends: Sequence[End], rows_max: int = ROWS_MAX) -> Lessons:
    """Go through finished jobs in the order of time; each learns what was known of its like at its submission.

    A job that does not tell when it was submitted is taken to have known all that ended before it.
    """
    order = sorted(range(len(ends)), key=lambda index: (ends[index].ended_seconds, index))
    begun = [
        ends[index].ended_seconds if math.isnan(ends[index].submitted_seconds) else ends[index].submitted_seconds
        for index in range(len(ends))
    ]
    kept = sorted(order[-rows_max:], key=lambda index: (begun[index], index))
    memories, rows, next_end = Memories(), np.empty((len(kept), len(LEVELS), len(FIGURES))), 0
    surprising: dict[int, bool | None] = {}

    def learn_until(seconds: float) -> None:
        nonlocal next_end
        while next_end < len(order) and ends[order[next_end]].ended_seconds <= seconds:
            index = order[next_end]
            if index == waiting:
                break
            surprising[index] = memories.surprising(ends[index])
            memories.learn(ends[index])
            next_end += 1

    for row, waiting in enumerate(kept):
        learn_until(begun[waiting])
        rows[row] = memories.rows(memories.slots(ends[waiting].facts))
    waiting = -1
    learn_until(math.inf)
    odd = [surprising[index] for index in kept]
    return Lessons(
        facts=[ends[index].facts for index in kept],
        submitted=np.array([begun[index] for index in kept]),
        rows=rows,
        log_run=np.log([ends[index].run_seconds for index in kept]),
        surprising=np.array([np.nan if told is None else float(told) for told in odd]),
    )


def group_quantiles(rows: Floats, which: slice) -> Floats:
    """Take the quantiles of the closest level of which there are any; NaN where nothing was ever seen."""
    found = rows[:, FALLBACKS[0], which].copy()
    for level in FALLBACKS[1:]:
        missing = np.isnan(found[:, 0])
        if not missing.any():
            break
        found[missing] = rows[missing, level, which]
    return found


@dataclass(frozen=True)
class Model:
    """What was learnt: it takes in facts and figures and tells quantiles, in logarithms of seconds."""

    version: int
    ends: int  # that it was learnt from
    seen: int  # ends there had been by then
    encoder: Encoder
    trees: tuple[str, ...]  # three corrections, three trends, three quantiles without surprises, surprises
    surprises: tuple[float, ...]  # quantiles of how far surprises lie from the middle of their kind
    surprises_share: float  # serves where there are too few to learn from; the last tree is empty then

    @cached_property
    def _boosters(self) -> list[Booster]:
        from lightgbm import Booster  # half a second and 60 MiB: only for those that use it

        return [Booster(model_str=text) for text in self.trees if text]

    def load(self) -> None:
        """Make the trees ready, which takes a while."""
        assert self._boosters

    @property
    def is_of_its_columns(self) -> bool:
        """Whether the trees are of as many columns as they are shown."""
        width, own = self.encoder.width, [booster.num_feature() for booster in self._boosters]
        trends = set(own[3:6])
        return own[:3] == [width + 3] * 3 and set(own[6:]) == {width} and len(trends) == 1 and min(trends) > width + 3

    def predict(self, facts: Sequence[Facts], submitted: Floats, rows: Floats) -> tuple[Floats, Floats]:
        """Tell quantiles three times, (jobs, 3 ways, 3 quantiles), and how probable a surprise is."""
        described = self.encoder.matrix(facts, submitted, rows)
        views = [self.encoder.width + extra for extra in (3, described.shape[1], 0, 0)]
        told = [_told(booster, described[:, : views[number // 3]]) for number, booster in enumerate(self._boosters)]
        probability = told[9] if self.trees[9] else np.full(len(facts), self.surprises_share)
        corrected = group_quantiles(rows, LONGER) + np.column_stack(told[:3])
        trends = np.column_stack(told[3:6])
        plain = np.sort(np.column_stack(told[6:9]), axis=1)
        mixed = mixture(plain, np.array(self.surprises), probability) + _middle(rows)[:, None]
        return np.sort(np.stack([corrected, trends, mixed], axis=1), axis=2), probability

    def __getstate__(self) -> dict[str, object]:
        """Travel without the trees that were made ready."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def parts(self, bytes_max: int) -> Sequence[bytes]:
        """Write the model down in parts of a size that a store takes."""
        whole = self._dumped
        return [whole[start : start + bytes_max] for start in range(0, len(whole), bytes_max)]

    @cached_property
    def _dumped(self) -> bytes:
        """Write the model down."""
        figures = {name: getattr(self, name) for name in ("version", "ends", "seen", "surprises", "surprises_share")}
        columns = {"numbers": self.encoder.numbers, "words": self.encoder.words}
        return zlib.compress(json.dumps({**figures, **columns, "trees": self.trees}).encode(), 6)


def _told(booster: Booster, described: Floats) -> Floats:
    return np.asarray(booster.predict(described, num_threads=1), dtype=np.float64)


def _middle(rows: Floats) -> Floats:
    """The middle of a job's kind, from which surprises are far."""
    kind, everybody = rows[:, KIND, LONGER.start + 1], rows[:, -1, LONGER.start + 1]
    found: Floats = np.where(np.isnan(kind), everybody, kind)
    return found


def mixture(plain: Floats, surprises: Floats, probability: Floats) -> Floats:
    """Read quantiles off the mixture of jobs that go as they should and those that surprise, by halving.

    The plain jobs' distribution function is linear between its three quantiles, and beyond them falls off within as
    much as they are apart.
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
    """Read what `Model.dump` wrote, its trees too.

    Raises:
        ValueError: it is no such thing.
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
            raise ValueError("its trees are of other columns than it has")
    except (zlib.error, TypeError, KeyError, AttributeError, OverflowError, RecursionError, _broken()) as error:
        raise ValueError(f"this is no model: {error}") from None
    return model


def _broken() -> type[Exception]:
    """What LightGBM says of trees that cannot be read."""
    from lightgbm.basic import LightGBMError

    return LightGBMError


def train(ends: Sequence[End], version: int, seen: int) -> Model:
    """Learn from finished jobs; a pure function of them. Some hundred are needed for it to be of any use."""
    lessons = replay(ends)
    groups = group_quantiles(lessons.rows, LONGER)
    usable = ~np.isnan(groups[:, 0])
    encoder = Encoder.of(lessons.facts)
    coarse = {"min_data_in_leaf": int(np.clip(len(ends) / 250, 10, 40)), "num_leaves": 31}
    described = encoder.matrix(lessons.facts, lessons.submitted, lessons.rows)
    from_middle = lessons.log_run - _middle(lessons.rows)
    plain, judged = usable & ~(lessons.surprising == 1), usable & ~np.isnan(lessons.surprising)
    grow = _Grower(described, encoder.categories)
    trees = []
    grow = _Grower(described[:, : encoder.width + 3], encoder.categories)
    trees += [grow(usable, lessons.log_run - groups[:, place], alpha=share) for place, share in enumerate(SHARES)]
    grow = _Grower(described, encoder.categories)
    trees += [grow(usable, lessons.log_run, alpha=share, **coarse) for share in SHARES]
    grow = _Grower(described[:, : encoder.width], encoder.categories)
    trees += [grow(plain if plain.any() else usable, from_middle, alpha=share) for share in SHARES]
    odd = lessons.surprising[judged]
    trees.append(grow(judged, lessons.surprising) if min(odd.sum(), len(odd) - odd.sum()) >= SURPRISES_MIN else "")
    far = from_middle[usable & (lessons.surprising == 1)]
    surprises = np.quantile(far, KNOTS) if len(far) else np.linspace(-1e-3, 1e-3, len(KNOTS))
    share = (odd.sum() + 1) / (len(odd) + 2)
    return Model(version, len(ends), seen, encoder, tuple(trees), tuple(float(one) for one in surprises), float(share))


class _Grower:
    """Grows trees on one description of jobs."""

    def __init__(self, described: Floats, categories: list[int]) -> None:
        self._described, self._categories = described, categories

    def __call__(self, rows: Any, target: Floats, alpha: float | None = None, **more: Any) -> str:
        import lightgbm

        aim = {"objective": "binary"} if alpha is None else {"objective": "quantile", "alpha": float(alpha)}
        taught = lightgbm.Dataset(self._described[rows], target[rows], categorical_feature=self._categories)
        return str(lightgbm.train({**TREES, **aim, **more}, taught, ROUNDS).model_to_string())
