from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.properties import some

from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query, Submission
from cotenant.core.policy.options import parse
from cotenant.policies.lightgbm_duration import policy as policy_module
from cotenant.policies.lightgbm_duration.finished_jobs import Facts
from cotenant.policies.lightgbm_duration.policy import LightgbmDuration
from cotenant.policies.lightgbm_duration.runtime_model import COLUMNS_MAX, Encoder, read_model

OPTIONS = LightgbmDuration.Options(train_min=150, train_every=150)
KINDS = ("bert", "resnet", "gnmt")


def query(kind: str = "bert", *, at: float | None = 1e6, user: str = "ann", run_seconds: float = 0.0) -> Query:
    told = Submission("ann@lab", at, "training")
    return Query(user, kind, "", 1000, 1, run_seconds=run_seconds, submission=told)


def ended(kind: str, seconds: float, at: float, *, user: str = "ann", succeeded: bool = True) -> Observation:
    told = Submission("ann@lab", at, "training")
    allocation = Candidate(4)
    end = at + seconds
    return Observation(
        user, kind, "", 1000, 1, allocation, run_seconds=seconds, succeeded=succeeded, submission=told, seen_seconds=end
    )


def lived(
    policy: LightgbmDuration,
    jobs: int,
    *,
    seed: int = 1,
    factor: Callable[[int], float] = lambda number: 1.0,
    begin: int = 0,
) -> list[tuple[Estimate, float]]:
    """Run jobs one after another; trains when due. Returns the predictions and the outcomes."""
    rng = np.random.default_rng([seed, begin])
    story = []
    for number in range(begin, begin + jobs):
        kind, at = KINDS[int(rng.integers(len(KINDS)))], 50_000.0 * number
        middle = {"bert": 600.0, "resnet": 3000.0, "gnmt": 9000.0}[kind]
        seconds = middle * factor(number) * float(np.exp(0.4 * rng.standard_normal()))
        story.append((policy.estimate(query(kind, at=at)), seconds))
        policy.observe(ended(kind, seconds, at))
        if training_task := policy.training_task():
            policy.adopt(training_task.train())
    return story


@pytest.fixture(scope="module")
def learnt() -> tuple[LightgbmDuration, list[tuple[Estimate, float]]]:
    policy = LightgbmDuration(OPTIONS)
    return policy, lived(policy, 900)


def test_a_job_unlike_any_before_gets_no_prediction() -> None:
    estimate = LightgbmDuration().estimate(query())
    assert not estimate.predictable
    assert estimate.remaining_seconds is None


def test_before_there_is_a_model_history_speaks() -> None:
    policy = LightgbmDuration()
    for number in range(8):
        policy.observe(ended("bert", 60.0, 100.0 * number))
    assert policy.model is None
    assert policy.training_task() is None
    assert policy.estimate(query()).remaining_seconds == 60.0


@pytest.mark.deep
def test_an_interval_of_80_percent_holds_80_percent(
    learnt: tuple[LightgbmDuration, list[tuple[Estimate, float]]],
) -> None:
    held = [
        told.remaining_p10_seconds <= came <= told.remaining_p90_seconds
        for told, came in learnt[1][300:]
        if told.remaining_p10_seconds is not None and told.remaining_p90_seconds is not None
    ]
    assert len(held) > 500
    assert 0.75 <= np.mean(held) <= 0.85


@pytest.mark.deep
def test_quantiles_never_cross_and_each_kind_has_its_own(
    learnt: tuple[LightgbmDuration, list[tuple[Estimate, float]]],
) -> None:
    for told, _ in learnt[1]:
        if told.predictable and told.remaining_p10_seconds is not None:
            assert told.remaining_seconds is not None
            assert told.remaining_p90_seconds is not None
            assert 0 < told.remaining_p10_seconds <= told.remaining_seconds <= told.remaining_p90_seconds
    middles = [learnt[0].estimate(query(kind)).remaining_seconds for kind in KINDS]
    np.testing.assert_allclose(np.array(middles, dtype=float), [600.0, 3000.0, 9000.0], rtol=0.35)


def test_batch_estimates_equal_single_estimates(
    learnt: tuple[LightgbmDuration, list[tuple[Estimate, float]]],
) -> None:
    queries = [query(kind, at=at) for kind in (*KINDS, "new") for at in (5e7, None)]
    assert list(learnt[0].estimate_many(queries)) == [learnt[0].estimate(one) for one in queries]
    assert learnt[0].estimate_many([]) == []


def test_a_job_is_predicted_again_only_if_something_about_it_or_the_model_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, predicted = LightgbmDuration(OPTIONS), list[int]()
    lived(policy, 200)
    plain = policy.quantiles

    def counted(queries: Sequence[Query]) -> object:
        predicted.append(len(queries))
        return plain(queries)

    monkeypatch.setattr(policy, "quantiles", counted)
    queries = [query(kind, at=5e7) for kind in KINDS]
    first = policy.estimate_many(queries)
    assert policy.estimate_many(queries) == first
    assert policy.estimate_many(queries[::-1]) == first[::-1]
    assert predicted == [3]
    policy.estimate_many([*queries, query(run_seconds=60.0, at=5e7)])
    assert predicted == [3, 1], "of four, one has run longer"
    policy.observe(ended("bert", 600.0, 6e7))
    policy.estimate_many(queries)
    assert predicted == [3, 1, 3], "a job ended"


def test_a_long_running_job_gets_its_remaining_time_and_an_outlier_none(
    learnt: tuple[LightgbmDuration, list[tuple[Estimate, float]]],
) -> None:
    whole, later = (learnt[0].estimate(query(run_seconds=seconds)) for seconds in (0.0, 900.0))
    assert whole.remaining_seconds is not None
    assert later.remaining_seconds is not None
    assert 900.0 + later.remaining_seconds > whole.remaining_seconds
    assert not learnt[0].estimate(query(run_seconds=1e8)).predictable


def test_a_job_without_a_submission_time_counts_as_submitted_when_the_last_job_ended(
    learnt: tuple[LightgbmDuration, list[tuple[Estimate, float]]],
) -> None:
    policy, story = learnt
    last = max(50_000.0 * number + seconds for number, (_, seconds) in enumerate(story))
    undated, at_the_end, long_before = (policy.quantiles([query(at=at)])[0].tolist() for at in (None, last, 0.0))
    assert undated == at_the_end != long_before


@pytest.mark.deep
def test_jobs_that_keep_surprising_are_unpredictable() -> None:
    policy, rng = LightgbmDuration(OPTIONS), np.random.default_rng(3)
    for number in range(400):
        at = 50_000.0 * number
        policy.observe(ended("steady", 600.0 * float(np.exp(0.1 * rng.standard_normal())), at))
        policy.observe(ended("wild", float(np.exp(rng.uniform(0, 10))), at))
        if training_task := policy.training_task():
            policy.adopt(training_task.train())
    assert policy.estimate(query("steady")).predictable
    wild = policy.estimate(query("wild"))
    assert not wild.predictable
    assert "surprise" in wild.source


@pytest.mark.deep
def test_the_same_jobs_make_the_same_model_and_the_same_estimates() -> None:
    one, other = LightgbmDuration(OPTIONS), LightgbmDuration(OPTIONS)
    assert lived(one, 400) == lived(other, 400)
    assert one.dump() == other.dump()


@pytest.mark.deep
def test_when_jobs_take_twice_as_long_estimates_follow_within_a_hundred_and_fifty() -> None:
    policy = LightgbmDuration(OPTIONS)
    lived(policy, 450)
    after = lived(policy, 300, begin=450, factor=lambda number: 2.0)
    told = [estimate.remaining_seconds / came for estimate, came in after[150:] if estimate.remaining_seconds]
    assert len(told) > 100
    assert 0.8 <= np.median(told) <= 1.25


def kept(policy: LightgbmDuration) -> dict[str, bytes]:
    """All records of a policy that dumped into an empty store."""
    return {name: content for name, content in policy.dump().items() if content}


@pytest.mark.deep
def test_a_restart_forgets_nothing() -> None:
    policy = LightgbmDuration(OPTIONS)
    lived(policy, 520)
    records = kept(policy)
    again = LightgbmDuration(OPTIONS)
    assert again.restore(records) == []
    assert [again.estimate(query(kind)) for kind in KINDS] == [policy.estimate(query(kind)) for kind in KINDS]
    assert again.model is not None
    assert policy.model is not None
    assert again.model.version == policy.model.version
    assert again.dump() == {}
    assert lived(again, 200, begin=520)[-1] == lived(policy, 200, begin=520)[-1]


def test_a_follower_estimates_as_its_leader_once_it_has_all_parts_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "PART_BYTES", 16 * 1024)
    leader, follower = LightgbmDuration(OPTIONS), LightgbmDuration(OPTIONS)
    for begin, jobs in ((0, 100), (100, 60), (160, 160)):  # before a model, with the first, with the next
        lived(leader, jobs, begin=begin)
        version, changed = follower.model and follower.model.version, leader.dump()
        parts = {name: content for name, content in changed.items() if name.startswith("model-")}
        assert follower.follow({name: changed[name] for name in changed.keys() - parts.keys()}) == []
        assert (len(parts) > 1) == (begin > 0)
        for name, content in parts.items():
            assert (follower.model and follower.model.version) == version, "the old model until the new one is complete"
            assert follower.follow({name: content}) == []
        assert (follower.model and follower.model.version) == (leader.model and leader.model.version)
        assert [follower.estimate(query(kind)) for kind in KINDS] == [leader.estimate(query(kind)) for kind in KINDS]
    assert follower.follow({"ends-x": b"", "ends-00000009": b"x", "blend": b"[]"}) == [
        "ends-00000009",
        "ends-x",
        "blend",
    ]


@pytest.fixture(scope="module")
def records() -> Mapping[str, bytes]:
    """What is kept after 300 jobs."""
    policy = LightgbmDuration(OPTIONS)
    lived(policy, 300)
    return kept(policy)


@pytest.mark.parametrize("damage", [b"[]", pytest.param(b"\x00", marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", some(["model-0", "ends-00000000", "ends-00000001", "blend"], 2))
def test_a_record_that_cannot_be_read_is_named_and_estimates_go_on(
    records: Mapping[str, bytes], name: str, damage: bytes
) -> None:
    assert name in records
    again = LightgbmDuration(OPTIONS)
    assert again.restore({**records, name: damage}) == [name]
    again.estimate(query())
    lived(again, 200, begin=300)
    assert again.model is not None
    assert again.estimate(query()).predictable


def test_a_model_with_trees_that_cannot_be_read_is_refused() -> None:
    policy = LightgbmDuration(OPTIONS)
    lived(policy, 300)
    assert policy.model is not None
    whole = b"".join(policy.model.parts(1000))
    assert read_model(whole) == policy.model
    for damaged in (whole[:-1], whole[: len(whole) // 2], b""):
        with pytest.raises(ValueError, match="invalid model"):
            read_model(damaged)
    told = json.loads(zlib.decompress(whole))
    wider = zlib.compress(json.dumps({**told, "numbers": [*told["numbers"], "of another model"]}).encode())
    with pytest.raises(ValueError, match="its trees have a different number of columns"):
        read_model(wider)


def test_the_oldest_jobs_are_forgotten_first() -> None:
    policy = LightgbmDuration(LightgbmDuration.Options(ends_max=512, train_min=10**6))
    for number in range(1200):
        policy.observe(ended("bert", 60.0, 100.0 * number))
    records = policy.dump()
    assert [name for name in sorted(records) if name.startswith("ends") and records[name]] == [
        "ends-00000002",
        "ends-00000003",
        "ends-00000004",
    ]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_an_invalid_run_time_is_rejected_completely(seconds: float) -> None:
    policy = LightgbmDuration()
    with pytest.raises(ValueError, match="positive and finite"):
        policy.observe(ended("bert", seconds, 0.0))
    assert policy.dump() == {}


def test_failed_jobs_are_learned_from_too() -> None:
    policy = LightgbmDuration(OPTIONS)
    for number in range(200):
        policy.observe(ended("bert", 60.0 + number % 3, 100.0 * number, succeeded=False))
    training_task = policy.training_task()
    assert training_task is not None
    model = replace(training_task, version=3, seen=5000).train()  # the oldest were forgotten
    assert (model.version, model.ends, model.seen) == (3, 200, 5000)
    policy.adopt(model)
    estimate = policy.estimate(query())
    assert estimate.remaining_seconds == pytest.approx(61.0, abs=3.0)
    assert "model 3, of 200 finished jobs" in estimate.source


def test_options_that_make_no_sense_are_named() -> None:
    options = LightgbmDuration.Options(ends_max=1, train_min=0, train_growth=2.0)
    assert [wrong.field for wrong in options.check()] == ["ends_max", "train_min", "train_growth"]
    assert parse(LightgbmDuration.Options, {}) == LightgbmDuration.Options()


def test_facts_that_most_jobs_state_get_a_column_and_those_that_never_differ_get_none() -> None:
    names = [f"f{number:02}" for number in range(COLUMNS_MAX + 2)]
    jobs: list[Facts] = []
    for number, name in enumerate(names):
        jobs += [((name, float(value)),) for value in range(number + 2)]
    encoder = Encoder.of([*jobs, *[(("same", 1.0),)] * 99])
    assert sorted(encoder.numbers) == names[2:]
    assert encoder.words == ()


def test_a_field_is_one_of_words_if_more_than_half_of_its_values_are() -> None:
    def encoder(words: int) -> Encoder:
        jobs: list[Facts] = [(("f", f"word {number % 2}"),) for number in range(words)]
        return Encoder.of([*jobs, *((("f", float(number)),) for number in range(10))])

    assert (encoder(10).numbers, encoder(10).words) == (("f",), ())
    assert encoder(11).words == (("f", ("word 0", "word 1")),)
    assert encoder(11).numbers == ("gpus",), "trees need a column"
