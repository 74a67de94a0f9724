from __future__ import annotations

import math

import pytest

from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.policy.options import BadOption, parse
from cotenant.policies.xiao_piecewise import RATES_MAX, SETTINGS_MAX, XiaoPiecewise

# Rates relative to 3 cores per GPU, of ResNet18 on one GPU (Synergy, OSDI 2022, MIT licence, msr-fiddle/synergy).
RESNET18 = {1: 0.37, 2: 0.72, 3: 1.0, 4: 1.3, 5: 1.53, 6: 1.75, 9: 2.4, 12: 2.4, 24: 2.4}


def paced(rate: float | None, cores: int = 4, **about: object) -> Observation:
    given = {"user": "ann", "model": "bert", "name": "", "gpu_milli": 1000, "replicas": 1, "phase": "", **about}
    seen = Candidate(cores, 1000, int(given.pop("nodes", 1)), str(given.pop("gpu_type", "")))  # type: ignore[call-overload]  # an int
    return Observation(allocation=seen, rate_per_second=rate, window_seconds=60.0, **given)  # type: ignore[arg-type]  # by name


def profile(cores: tuple[int, ...] = (1, 2, 6, 24), **about: object) -> list[Observation]:
    return [paced(10 * RESNET18[count], count, **about) for count in cores]


def taught(*seen: Observation, **options: str) -> XiaoPiecewise:
    predictor = XiaoPiecewise(parse(XiaoPiecewise.Options, options))
    for observation in seen:
        predictor.observe(observation)
    return predictor


def asked(predictor: XiaoPiecewise, *cores: int, **about: object) -> Estimate:
    query = {"user": "ann", "model": "bert", "name": "", "gpu_milli": 1000, "replicas": 1, **about}
    query.setdefault("candidates", tuple(Candidate(count, 1000) for count in cores))
    return predictor.estimate(Query(**query))  # type: ignore[arg-type]  # by name


def test_four_points_predict_the_rate_on_any_core_count() -> None:
    estimate = asked(taught(*profile()), *RESNET18)
    rates = [candidate.rate_per_second for candidate in estimate.candidates]
    assert rates == pytest.approx([10 * rate for rate in RESNET18.values()], rel=0.16)
    assert all(candidate.confidence > 0.5 for candidate in estimate.candidates)
    assert estimate.cores_useful in (8, 9)
    assert estimate.cores_useful_confidence > 0.8
    assert estimate.source.startswith("θ is 5 to 10 cores, from 4 core counts")
    assert not estimate.predictable, "without steps there is no remaining time"


def test_remaining_steps_give_the_remaining_time() -> None:
    estimate = asked(taught(*profile()), cores=2, step=100, steps_total=820)
    assert estimate.predictable
    assert estimate.remaining_seconds == pytest.approx(100, rel=0.15)
    assert estimate.remaining_p10_seconds < estimate.remaining_seconds < estimate.remaining_p90_seconds  # type: ignore[operator]  # told above
    place_parts_anywhere = asked(taught(*profile()), steps_total=2400)
    assert place_parts_anywhere.remaining_seconds == pytest.approx(100, rel=0.05), "with the useful cores"


def test_a_single_point_predicts_its_rate_but_no_theta() -> None:
    estimate = asked(taught(paced(5.0, 4)), 4, 1)
    here, there = estimate.candidates
    assert here.rate_per_second == pytest.approx(5.0, rel=0.01)
    assert there.confidence < here.confidence
    assert estimate.cores_useful is None
    assert estimate.source == "the rate was not observed to level off by 4 cores"


def test_a_rate_that_still_rises_is_less_sure_beyond_what_was_seen() -> None:
    predictor = taught(*[paced(2.0 * cores, cores) for cores in (1, 2, 4, 6)])
    inside, beyond = asked(predictor, 6, 12).candidates
    assert beyond.rate_per_second == inside.rate_per_second
    assert beyond.confidence <= inside.confidence / 2
    assert asked(predictor).cores_useful == 6, "at least so many"


def test_nothing_is_said_where_nothing_was_seen() -> None:
    estimate = asked(XiaoPiecewise(), 4)
    assert (estimate.predictable, estimate.cores_useful) == (False, None)
    assert estimate.candidates[0].rate_per_second is None
    assert estimate.source == "no rate of a similar job was observed on known cores"


def test_cores_that_are_not_decided_have_no_rate() -> None:
    assert asked(taught(*profile()), 0).candidates[0].rate_per_second is None


def test_phases_gpu_types_and_spreads_have_curves_of_their_own() -> None:
    predictor = taught(
        *profile(),
        *[paced(100.0, cores, phase="validation") for cores in (1, 24)],
        *[paced(7.0, cores, gpu_type="A100") for cores in (1, 24)],
        *[paced(3.0, cores, nodes=2) for cores in (1, 24)],
    )
    assert asked(predictor, phase="validation").cores_useful == 1
    asked_for = (Candidate(24, 1000), Candidate(24, 1000, gpu_type="A100"), Candidate(24, 1000, nodes=2))
    rates = [one.rate_per_second for one in asked(predictor, candidates=asked_for).candidates]
    assert rates == pytest.approx([24.0, 7.0, 3.0], rel=0.02)
    (unseen,) = asked(predictor, candidates=(Candidate(24, 1000, gpu_type="H100"),)).candidates
    assert unseen.rate_per_second is None


def test_other_users_jobs_of_the_same_model_serve_with_less_confidence() -> None:
    predictor = taught(*profile())
    own, other = asked(predictor, 6), asked(predictor, 6, user="bob")
    assert other.candidates[0].rate_per_second == own.candidates[0].rate_per_second
    assert other.candidates[0].confidence == pytest.approx(0.6 * own.candidates[0].confidence)
    assert other.cores_useful == own.cores_useful
    assert "of other users' jobs" in other.source
    wider = asked(predictor, 6, user="bob", gpu_milli=4000, replicas=4)
    assert (wider.candidates[0].rate_per_second, wider.cores_useful) == (None, own.cores_useful), "θ alone"
    assert asked(predictor, user="bob", gpu_milli=2000).cores_useful is None, "two GPUs per replica"
    assert asked(taught(*profile(model="", name="run")), user="bob", model="", name="run").cores_useful is None
    assert asked(taught(*profile(), *profile(user="bob", model="gnmt")), user="bob", model="gnmt").cores_useful


def test_own_windows_count_more_than_those_of_other_users() -> None:
    predictor = taught(*profile(user="bob"), paced(99.0, 6))
    assert asked(predictor, 6).candidates[0].rate_per_second == pytest.approx(99.0, rel=0.01)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_an_invalid_rate_is_rejected_completely(rate: float) -> None:
    predictor = taught(*profile())
    predictor.dump()
    before = asked(predictor, 3)
    with pytest.raises(ValueError, match="a rate must be positive and finite"):
        predictor.observe(paced(rate, 3))
    assert (predictor.dump(), asked(predictor, 3)) == ({}, before)


def test_a_zero_and_an_end_are_ignored_as_rates() -> None:
    assert taught(paced(0.0), paced(None), paced(5.0, cores=0)).dump() == {}
    with pytest.raises(ValueError, match="invalid job: -1 cores"):
        XiaoPiecewise().observe(paced(5.0, cores=-1))


def test_learned_state_survives_a_restart() -> None:
    before, after = taught(*profile(), *profile(phase="validation", gpu_type="T4")), XiaoPiecewise()
    assert after.restore(before.dump()) == []
    for phase in ("", "validation"):
        assert asked(after, 3, 9, phase=phase) == asked(before, 3, 9, phase=phase)


@pytest.mark.parametrize(
    "record",
    [
        b"{",
        b"[]",
        b'{"key":["a","b","1"],"rates":[]}',
        b'{"key":["a","b","x","1"],"rates":[]}',
        b'{"key":["a","b","1","0"],"rates":[]}',
        b'{"key":["a","b","1","1"],"rates":[["","",1,4,[NaN]]]}',
        b'{"key":["a","b","1","1"],"rates":[["","",1,4,[0]]]}',
        b'{"key":["a","b","1","1"],"rates":[["","",1,0,[1]]]}',
        b'{"key":["a","b","1","1"],"rates":[["","",1,1e999,[1]]]}',
        b'{"key":["a","b","1","1"],"rates":[["","",1,4,7]]}',
        b'{"key":["a","b","1","1"],"rates":[["",1,4,[1]]]}',
        b"[" * 100_000,
    ],
)
def test_a_record_that_cannot_be_read_is_named_and_the_others_serve(record: bytes) -> None:
    good = taught(*profile()).dump()
    predictor = XiaoPiecewise()
    assert predictor.restore({"bad": record, **good, "gone": b""}) == ["bad"]
    assert asked(predictor).cores_useful
    for observation in profile(user="a", model="b"):
        predictor.observe(observation)
    assert asked(predictor, user="a", model="b").cores_useful, "relearnt"


def test_the_kind_unused_for_longest_is_forgotten_and_its_record_with_it() -> None:
    predictor = taught(*profile(model="a"), *profile(model="b"), kinds_max="2")
    predictor.dump()
    asked(predictor, model="a")
    predictor.observe(paced(1.0, model="c"))
    assert predictor.dump()["ann/b/1000/1"] == b""
    assert [asked(predictor, model=model).cores_useful is not None for model in "abc"] == [True, False, False]


def test_memory_of_one_job_class_is_bounded() -> None:
    seen = [paced(1.0, cores, nodes=nodes) for nodes in range(1, 40) for cores in range(1, 60)]
    (record,) = taught(*seen, *[paced(2.0, 4)] * 100).dump().values()
    assert len(record) < 60_000
    assert record.count(b"2.0") == RATES_MAX
    assert SETTINGS_MAX < 39


def test_options_that_make_no_sense_are_all_named() -> None:
    wrong = {"kinds_max": "0", "confidence_min": "2", "others_trust": "-1", "noise": "0", "form": "1"}
    with pytest.raises(BadOption) as caught:
        parse(XiaoPiecewise.Options, wrong)
    assert {violation.field for violation in caught.value.violations} == set(wrong)


def test_an_answer_by_what_others_jobs_did_is_not_given_again_once_they_did_something_else() -> None:
    predictor = XiaoPiecewise()
    asked = Query("bob", "bert", "", 1000, 1, candidates=(Candidate(4), Candidate(4, gpu_type="k80")))

    def rates() -> list[float | None]:
        return [one.rate_per_second for one in predictor.estimate(asked).candidates]

    def saw(user: str, rate: float, gpu_type: str) -> None:
        seen = Candidate(4, gpu_type=gpu_type)
        predictor.observe(Observation(user, "bert", "", 1000, 1, seen, rate_per_second=rate, window_seconds=10.0))

    saw("bob", 4.0, "h100")
    assert rates() == [4.0, None]
    saw("ann", 2.0, "k80")
    assert rates() == [4.0, 2.0]
    saw("bob", 1.0, "k80")
    assert rates()[1] == 1.0
