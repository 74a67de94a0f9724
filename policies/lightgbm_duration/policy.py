"""Run times learned from finished jobs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.estimate import Estimate, Observation, Query
from cotenant.core.model.job_table import Floats
from cotenant.core.model.refusal import plural
from cotenant.core.model.validation import Violation
from cotenant.policies.history import History
from cotenant.policies.lightgbm_duration.blending import Blend, remaining
from cotenant.policies.lightgbm_duration.finished_jobs import (
    BLOCK_ENDS,
    End,
    Facts,
    facts_of,
    pack,
    submitted_seconds,
    unpack,
)
from cotenant.policies.lightgbm_duration.recurrence import LONGER, SHORT, RecurrenceTable
from cotenant.policies.lightgbm_duration.runtime_model import Model, group_quantiles, read_model, train

MODELS = 5  # blended models: quantiles of all similar jobs, of the latest of them, and three of the trained model
PREDICTED_MAX = 20_000  # jobs whose estimates are remembered until they end
PART_BYTES = 512 * 1024  # of one record of a model
HISTORY, BLOCK, MODEL, BLEND = "history/", "ends-", "model-", "blend"

QueryKey = tuple[Facts, float | None, float, bool]  # all inputs of an answer besides what was learned, and `history`
JobKey = tuple[Facts, float]  # what identifies a job: its facts and its submission time


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """Finished jobs to learn from, as stored blocks: it can be sent to another process for training."""

    blocks: tuple[bytes, ...]
    version: int
    seen: int

    def train(self) -> Model:
        """Train a model; a pure function of the blocks."""
        return train([end for block in self.blocks for end in unpack(block)], self.version, self.seen)


class LightgbmDuration:
    """Predict a job's run time with trees over all facts of its submission, with a confidence.

    Quantiles (10th, 50th, 90th percentile) of the run time from gradient-boosted trees (Ke et al., LightGBM, NIPS 2017
    [P]) over the job's request and the outcomes of similar jobs (`cotenant.policies.lightgbm_duration.runtime_model`),
    blended with plain quantiles of similar jobs by how well each did recently, and calibrated by adaptive conformal
    inference (`cotenant.policies.lightgbm_duration.blending`). 71 % of jobs are resubmissions, and 95.7 % of those
    predictable (AITurbo: Zhao et al., HPDC 2021 [C]): the probability of a surprise, from the recurrence of similar
    jobs and the trees, decides whether the job is predictable; the minimum confidence is 0.5 [D].

    Training happens elsewhere: `training_task` returns the training data, any process trains on it, and `adopt` takes
    the model. Without a model, and for jobs with known rates, `history` answers.

    >>> from cotenant.core.model.estimate import Candidate
    >>> policy = LightgbmDuration(LightgbmDuration.Options(train_min=40))
    >>> for number in range(60):
    ...     kind, seconds = ("short", 60.0) if number % 2 else ("long", 3600.0)
    ...     run = Observation("ann", kind, "", 1000, 1, Candidate(4), run_seconds=seconds + number % 5, succeeded=True)
    ...     policy.observe(run)
    >>> policy.adopt(policy.training_task().train())
    >>> round(policy.estimate(Query("ann", "long", "", gpu_milli=1000, replicas=1)).remaining_seconds, -2)
    3600.0
    """

    name = "lightgbm-duration"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How much is remembered, when to train, and how much confidence is needed.

        ends_max: finished jobs remembered; the oldest are dropped first.
        keys_max: keys of similar jobs (a user, a model with its GPUs, …) remembered; the least recently used key is
          dropped.
        train_min: finished jobs needed for the first model.
        train_every: minimum number of finished jobs between two trainings.
        train_growth: the same, as a share of the remembered jobs, so that training stays cheap as they grow.
        confidence_min: minimum confidence from which a job is predictable.
        """

        ends_max: int = 100_000
        keys_max: int = 30_000
        train_min: int = 200
        train_every: int = 250
        train_growth: float = 0.05
        confidence_min: float = 0.5

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for name, least in (("ends_max", BLOCK_ENDS), ("keys_max", 10), ("train_min", 20), ("train_every", 1)):
                if getattr(self, name) < least:
                    yield Violation(name, f"must be {least} or more, not {getattr(self, name)}")
            for name in ("train_growth", "confidence_min"):
                if not 0 <= getattr(self, name) <= 1:
                    yield Violation(name, f"must be from 0 to 1, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._history = History()
        self._recurrence = RecurrenceTable(self.options.keys_max)
        self._blend = Blend(MODELS)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # full blocks, by number
        self._open: list[End] = []  # the block being filled
        self._number = 0  # of the open block
        self._learnt = 0  # ends seen at the time of the last lesson
        self._model: Model | None = None
        self._latest = 0.0  # when the last job ended
        self._predicted: OrderedDict[JobKey, Floats] = OrderedDict()
        self._answered: tuple[tuple[int, int], dict[QueryKey, tuple[Estimate, Estimate]]] = (0, 0), {}
        self._parts: dict[str, bytes] = {}  # of a model that another replica is writing
        self._changed: dict[str, None] = {}

    @property
    def model(self) -> Model | None:
        """The model in use."""
        return self._model

    def observe(self, observation: Observation) -> None:
        """Record a window's rate, or the end of a job; failed jobs count, since they hold resources as well.

        Raises:
            ValueError: an invalid figure; nothing of the observation is kept.
        """
        self._history.observe(observation)
        if not observation.run_seconds:
            return
        submitted, ended = submitted_seconds(observation.submission), observation.seen_seconds
        if ended is None or not math.isfinite(ended):
            ended = self._latest if math.isnan(submitted) else max(self._latest, submitted + observation.run_seconds)
        end = End(facts_of(observation), submitted, ended, observation.run_seconds, observation.surprising)
        told = self._predicted.pop((end.facts, submitted), None)
        if told is not None:
            self._blend.learn(observation.user, told, math.log(end.run_seconds))
        self._learn(end)
        self._open.append(end)
        self._changed[_block(self._number)] = None
        if len(self._open) == BLOCK_ENDS:
            self._close()

    def _learn(self, end: End) -> None:
        self._recurrence.learn(end)
        self._latest = max(self._latest, end.ended_seconds)

    def _close(self) -> None:
        """Pack the full block, and drop the oldest blocks if there are too many."""
        self._blocks[self._number] = pack(self._open)
        self._open, self._number = [], self._number + 1
        while len(self._blocks) * BLOCK_ENDS > self.options.ends_max:
            forgotten, _ = self._blocks.popitem(last=False)
            self._changed[_block(forgotten)] = None

    @property
    def _seen(self) -> int:
        """Ends seen so far, including dropped ones."""
        return self._number * BLOCK_ENDS + len(self._open)

    def training_task(self) -> TrainingTask | None:
        """Return the data of the next training once enough was observed since the last; else None."""
        kept = len(self._blocks) * BLOCK_ENDS + len(self._open)
        due = max(self.options.train_every, self.options.train_growth * kept) if self._learnt else 0
        if kept < self.options.train_min or self._seen - self._learnt < due:
            return None
        self._learnt = self._seen
        blocks = (*self._blocks.values(), *([pack(self._open)] if self._open else []))
        return TrainingTask(blocks, self._model.version + 1 if self._model else 1, self._seen)

    def adopt(self, model: Model) -> None:
        """Use a new model from now on."""
        before = len(self._model.parts(PART_BYTES)) if self._model else 0
        self._model, self._learnt = model, max(self._learnt, model.seen)
        for part in range(max(before, len(model.parts(PART_BYTES)))):
            self._changed[f"{MODEL}{part}"] = None

    def estimate(self, query: Query) -> Estimate:
        """Return how long a job will run, with the confidence and the source."""
        return self.estimate_many([query])[0]

    def estimate_many(self, queries: Sequence[Query]) -> Sequence[Estimate]:
        """Estimate jobs together, which takes a fraction of the time."""
        known = [self._history.estimate(query) for query in queries]
        if self._model is None or not (queries and self._seen):
            return known
        version = self._seen, self._model.version
        if self._answered[0] != version or len(self._answered[1]) > PREDICTED_MAX:
            self._answered = version, {}
        answers = self._answered[1]
        asked = [
            (facts_of(query), query.submission.submitted_seconds, query.run_seconds, query.steps_total > query.step)
            for query in queries
        ]
        told = {
            place: found[1]
            for place, one in enumerate(asked)
            if (found := answers.get(one)) and found[0] == known[place]
        }
        if new := [place for place in range(len(queries)) if place not in told]:
            blended, surprise = self.quantiles([queries[place] for place in new])
            rest = remaining(blended, np.array([queries[place].run_seconds for place in new]))
            for place, quantiles, odd in zip(new, rest.tolist(), surprise.tolist(), strict=True):
                told[place] = self._build_estimate(queries[place], known[place], quantiles, odd)
                answers[asked[place]] = known[place], told[place]
        return [told[place] for place in range(len(queries))]

    def quantiles(self, queries: Sequence[Query]) -> tuple[Floats, Floats]:
        """Return quantiles of total run times, as logarithms of seconds, and the probability of a surprise.

        NaN before there is a model.
        """
        if self._model is None or not self._seen:
            return np.full((len(queries), 3), np.nan), np.full(len(queries), np.nan)
        facts = [facts_of(query) for query in queries]
        submitted = np.array([submitted_seconds(query.submission) for query in queries])
        rows = self._recurrence.rows([self._recurrence.slots(one) for one in facts])
        at = np.where(np.isnan(submitted), self._latest, submitted)
        modelled, surprise = self._model.predict(facts, at, rows)
        groups = np.stack([group_quantiles(rows, LONGER), group_quantiles(rows, SHORT)], axis=1)
        told = np.concatenate([groups, modelled], axis=1)
        self._remember(queries, facts, submitted, told)
        return self._blend.of([query.user for query in queries], told), surprise

    def _remember(self, queries: Sequence[Query], facts: Sequence[Facts], submitted: Floats, told: Floats) -> None:
        """Remember the predictions for jobs that have not run yet, to compare them with the outcomes."""
        for place, query in enumerate(queries):
            if query.submission.submitted_seconds is not None and not query.run_seconds:
                self._predicted[facts[place], float(submitted[place])] = told[place]
        while len(self._predicted) > PREDICTED_MAX:
            self._predicted.popitem(last=False)

    def _build_estimate(self, query: Query, before: Estimate, quantiles: Sequence[float], surprise: float) -> Estimate:
        """Build an estimate; a known rate takes precedence over similar jobs."""
        confidence = 1.0 - surprise
        if before.predictable and query.steps_total > query.step and self._history.knows_rate(query):
            return before
        low, middle, high = quantiles
        assert self._model
        if math.isnan(middle):
            source = "it has outlived nearly all expected run times"
            return Estimate(cores_useful=before.cores_useful, candidates=before.candidates, source=source)
        if confidence < self.options.confidence_min:
            if before.predictable:
                return before
            source = f"{surprise:.0%} of similar jobs surprise, by model {self._model.version}"
            return Estimate(cores_useful=before.cores_useful, candidates=before.candidates, source=source)
        source = f"model {self._model.version}, of {plural(self._model.ends, 'finished job')}"
        return Estimate(
            predictable=True,
            confidence=confidence,
            remaining_seconds=middle,
            remaining_p10_seconds=low,
            remaining_p90_seconds=high,
            cores_useful=before.cores_useful,
            candidates=before.candidates,
            source=source,
        )

    def dump(self) -> Mapping[str, bytes]:
        """Return the records changed since the last dump; an empty record was dropped."""
        changed, self._changed = self._changed, {}
        records = {HISTORY + name: content for name, content in self._history.dump().items()}
        parts = self._model.parts(PART_BYTES) if self._model else ()
        for name in changed:
            if name.startswith(MODEL):
                part = int(name.removeprefix(MODEL))
                records[name] = parts[part] if part < len(parts) else b""
            else:
                number = int(name.removeprefix(BLOCK))
                records[name] = pack(self._open) if number == self._number else self._blocks.get(number, b"")
        if self._blend.changed:
            records[BLEND] = self._blend.dump()
        return records

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns the names of unreadable ones. What is lost is learned again."""
        told = {name: content for name, content in records.items() if content}
        past = {name.removeprefix(HISTORY): told[name] for name in told if name.startswith(HISTORY)}
        unread = [HISTORY + name for name in self._history.restore(past)]
        blocks = [name for name in told if name.startswith(BLOCK)]
        parts = [name for name in told if name.startswith(MODEL)]
        unread += self._restore_ends({name: told[name] for name in blocks})
        unread += self._restore_model({name: told[name] for name in parts})
        if BLEND in told:
            try:
                self._blend.restore(told[BLEND])
            except ValueError:
                unread.append(BLEND)
        ours = {BLEND, *blocks, *parts}
        return unread + [name for name in told if name not in ours and not name.startswith(HISTORY)]

    def follow(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Apply records that another replica wrote: new ends of a growing block, a model once it is complete.

        The parts of a model are written in successive transactions, so parts of two versions may coexist for a moment;
        the old model stays in use until the new one is complete.
        """
        past = {name.removeprefix(HISTORY): told for name, told in records.items() if name.startswith(HISTORY)}
        unread = [HISTORY + name for name in self._history.restore(past)]
        blocks = sorted(name for name in records if name.startswith(BLOCK))
        unread += [name for name in blocks if not self._follow_block(name, records[name])]
        if parts := {name: told for name, told in records.items() if name.startswith(MODEL)}:
            known = self._model.parts(PART_BYTES) if self._model else ()
            self._parts = {f"{MODEL}{place}": part for place, part in enumerate(known)} | self._parts | parts
            whole = {name: told for name, told in self._parts.items() if told}
            if not self._restore_model(whole):
                self._parts = {}
        if records.get(BLEND):
            try:
                self._blend.restore(records[BLEND])
            except ValueError:
                unread.append(BLEND)
        return unread

    def _follow_block(self, name: str, content: bytes) -> bool:
        """Learn the new ends of a block; an empty block was dropped."""
        try:
            number, ends = int(name.removeprefix(BLOCK)), list(unpack(content)) if content else []
        except ValueError:
            return False
        if not ends:
            self._blocks.pop(number, None)
        elif number >= self._number:
            for end in ends[len(self._open) if number == self._number else 0 :]:
                self._learn(end)
            self._number, self._open = number, ends
            if len(ends) == BLOCK_ENDS:
                self._close()
        return True

    def _restore_ends(self, records: Mapping[str, bytes]) -> Sequence[str]:
        unread: list[str] = []
        blocks: dict[int, list[End]] = {}
        for name, content in records.items():
            try:
                number, ends = int(name.removeprefix(BLOCK)), list(unpack(content))
            except ValueError:
                unread.append(name)
                continue
            if name == _block(number) and 0 < len(ends) <= BLOCK_ENDS:
                blocks[number] = ends
            else:
                unread.append(name)
        for number in sorted(blocks):
            for end in blocks[number]:
                self._learn(end)
            self._blocks[number] = records[_block(number)]
            self._number = number + 1
        if blocks and len(blocks[max(blocks)]) < BLOCK_ENDS:
            self._number, self._open = max(blocks), blocks[max(blocks)]
            del self._blocks[self._number]
        return unread

    def _restore_model(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Assemble a model from its parts; returns all names if that fails."""
        if not records:
            return []
        names = [f"{MODEL}{part}" for part in range(len(records))]
        try:
            if set(names) != set(records):
                raise ValueError("parts of the model are missing")
            self._model = read_model(b"".join([records[name] for name in names]))
        except ValueError:
            return list(records)
        self._learnt = self._model.seen
        return []


def _block(number: int) -> str:
    return f"{BLOCK}{number:08d}"
