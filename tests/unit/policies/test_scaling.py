from __future__ import annotations

import math

import pytest

from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.policy.options import BadOption, parse
from cotenant.policies.scaling import PLACEMENTS_MAX, Scaling, Seen, features

# Step seconds of YOLOv3, batch 8 per GPU, by GPUs of each node (Pollux, OSDI 2021, profiles bundled with ElasticFlow,
# Apache-2.0).
YOLO = {"1": 0.326, "2": 0.357, "11": 0.810, "1111": 0.783, "4": 0.501, "22": 1.241, "4444": 1.188}


def timed(seconds: float, gpus: int, nodes: int = 1, **about: object) -> Observation:
    given = {"user": "ann", "model": "yolo", "name": "", "phase": "", "gpu_milli": 1000 * gpus, **about}
    each = int(given["gpu_milli"]) // gpus  # type: ignore[call-overload]  # an int
    seen = Candidate(int(given.pop("cores", 4)), each, nodes, str(given.pop("gpu_type", "")))  # type: ignore[call-overload]  # an int
    return Observation(replicas=gpus, allocation=seen, rate_per_second=1 / seconds, window_seconds=9.0, **given)  # type: ignore[arg-type]  # by name


def profiled(*placements: str) -> list[Observation]:
    return [timed(YOLO[one], sum(map(int, one)), len(one)) for one in placements]


def taught(*seen: Observation, **options: str) -> Scaling:
    predictor = Scaling(parse(Scaling.Options, options))
    for observation in seen:
        predictor.observe(observation)
    return predictor


def asked(predictor: Scaling, gpus: int, *candidates: Candidate, **about: object) -> Estimate:
    query = {"user": "ann", "model": "yolo", "name": "", "gpu_milli": 1000 * gpus, "replicas": gpus, **about}
    return predictor.estimate(Query(candidates=candidates, **query))  # type: ignore[arg-type]  # by name


def seconds_and_confidence(predictor: Scaling, gpus: int, nodes: int, **about: object) -> tuple[float, float]:
    each = int(about.get("gpu_milli", 1000 * gpus)) // gpus  # type: ignore[call-overload]  # an int
    (judged,) = asked(predictor, gpus, Candidate(4, each, nodes), **about).candidates
    assert judged.rate_per_second
    return 1 / judged.rate_per_second, judged.confidence


def test_three_small_placements_predict_the_others() -> None:
    predictor = taught(*profiled("1", "2", "11"))
    for placement in ("1111", "4"):
        seconds, confidence = seconds_and_confidence(predictor, 4, len(placement))
        assert seconds == pytest.approx(YOLO[placement], rel=0.4)
        assert confidence > 0.5
    seconds, far = seconds_and_confidence(predictor, 16, 4)
    assert seconds == pytest.approx(YOLO["4444"], rel=0.2)
    assert far < confidence, "farther from what was measured"


def test_without_noise_the_form_is_recovered() -> None:
    def truth(gpus: int, nodes: int) -> float:
        return 2.0 + 0.3 * math.log2(gpus / nodes) + 0.7 * 2 * (nodes - 1) / nodes

    placements = ((1, 1), (2, 1), (2, 2))
    predictor = taught(*[timed(truth(gpus, nodes), gpus, nodes) for gpus, nodes in placements])
    for gpus, nodes in ((8, 1), (8, 4), (64, 8)):
        assert seconds_and_confidence(predictor, gpus, nodes)[0] == pytest.approx(truth(gpus, nodes), rel=1e-6)


def test_genies_own_form_grows_with_the_log_of_the_nodes() -> None:
    seen = [timed(seconds, gpus, gpus) for gpus, seconds in ((1, 1.0), (2, 1.5))]
    assert seconds_and_confidence(taught(*seen, cross="log"), 16, 16)[0] == pytest.approx(3.0)
    assert seconds_and_confidence(taught(*seen), 16, 16)[0] == pytest.approx(1.0 + 0.5 * 2 * 15 / 16)


def test_a_step_that_gets_faster_with_more_gpus_shares_its_batch() -> None:
    seen = [timed(seconds, gpus) for gpus, seconds in ((1, 8.2), (2, 4.4), (4, 2.6))]
    assert seconds_and_confidence(taught(*seen), 8, 1)[0] == pytest.approx(1.8, rel=0.05)
    per_gpu = taught(*seen, batch="per-gpu")
    assert seconds_and_confidence(per_gpu, 8, 1)[1] < 0.5, "that form cannot have these times"


def test_the_first_step_across_nodes_is_unsure_until_it_was_seen() -> None:
    within = taught(*profiled("1", "2"))
    assert seconds_and_confidence(within, 4, 1)[1] > 0.5
    assert seconds_and_confidence(within, 4, 2)[1] < 0.5
    assert not asked(within, 4, Candidate(4, 1000, 2), steps_total=100).predictable


def test_one_placement_predicts_itself_and_little_else() -> None:
    predictor = taught(*profiled("1"))
    assert seconds_and_confidence(predictor, 1, 1)[1] > 0.9
    assert seconds_and_confidence(predictor, 2, 1)[1] < 0.5


def test_sharing_a_gpu_is_slower_by_what_was_seen() -> None:
    predictor = taught(timed(1.0, 1), timed(2.0, 2, 2))
    assert seconds_and_confidence(predictor, 1, 1, gpu_milli=500)[0] == pytest.approx(1.5), "Gavel's median"
    predictor.observe(timed(3.0, 1, gpu_milli=500))
    assert seconds_and_confidence(predictor, 1, 1, gpu_milli=500)[0] == pytest.approx(3.0)
    assert seconds_and_confidence(predictor, 1, 1)[0] == pytest.approx(1.0), "what is not shared is not slower"


def test_the_core_count_with_the_best_rate_speaks() -> None:
    predictor = taught(timed(9.0, 1, cores=1), timed(1.0, 1, cores=8), timed(5.0, 1, cores=2))
    assert seconds_and_confidence(predictor, 1, 1)[0] == pytest.approx(1.0)


def test_remaining_steps_give_the_remaining_time() -> None:
    estimate = asked(taught(*profiled("1", "2", "11")), 2, Candidate(4, 1000), step=100, steps_total=1100)
    assert estimate.predictable
    assert estimate.remaining_seconds == pytest.approx(357, rel=0.05)
    assert estimate.remaining_p10_seconds < 357 < estimate.remaining_p90_seconds  # type: ignore[operator]  # told above
    assert "fitted to 3 placements" in estimate.source


def test_other_users_serve_with_less_confidence_and_gpu_types_are_kept_apart() -> None:
    predictor = taught(*profiled("1", "2", "11"), timed(0.1, 1, gpu_type="A100"))
    own, other = seconds_and_confidence(predictor, 2, 1), seconds_and_confidence(predictor, 2, 1, user="bob")
    assert other == pytest.approx((own[0], 0.6 * own[1]))
    assert asked(predictor, 2, Candidate(4, 1000), user="bob", model="", name="yolo").candidates[0].confidence == 0
    (fast,) = asked(predictor, 1, Candidate(4, 1000, gpu_type="A100")).candidates
    assert fast.rate_per_second == pytest.approx(10)
    assert asked(predictor, 1, Candidate(4, 1000, gpu_type="H100")).candidates[0].rate_per_second is None


def test_validation_rates_do_not_count_for_training() -> None:
    assert taught(timed(1.0, 1, phase="validation")).dump() == {}
    assert not asked(taught(*profiled("1")), 1, Candidate(4, 1000), steps_total=9, phase="validation").predictable


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_an_invalid_rate_is_rejected_completely(rate: float) -> None:
    predictor = Scaling()
    with pytest.raises(ValueError, match="a rate must be positive and finite"):
        predictor.observe(Observation("ann", "yolo", "", 1000, 1, Candidate(4, 1000), rate_per_second=rate))
    assert predictor.dump() == {}


@pytest.mark.parametrize(
    "record",
    [
        b"{",
        b"[]",
        b'{"key":["a"],"rates":[]}',
        b'{"key":["a","b"],"rates":[["",1,2,false,4,[1]]]}',
        b'{"key":["a","b"],"rates":[["",0,0,false,4,[1]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,false,4,[NaN]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,false,4,[-1]]]}',
        b'{"key":["a","b"],"rates":[["",1,1,false,4,3]]}',
        b'{"key":["a","b"],"rates":[["",1e999,1,false,4,[1]]]}',
    ],
)
def test_a_record_that_cannot_be_read_is_named_and_the_others_serve(record: bytes) -> None:
    taught_before = taught(*profiled("1", "2", "11"), timed(3.0, 1, gpu_milli=500))
    predictor = Scaling()
    assert predictor.restore({"bad": record, **taught_before.dump()}) == ["bad"]
    for nodes in (1, 2):
        assert seconds_and_confidence(predictor, 4, nodes) == seconds_and_confidence(taught_before, 4, nodes)


def test_memory_of_one_job_class_is_bounded() -> None:
    (record,) = taught(*[timed(1.0, gpus, nodes) for gpus in range(1, 30) for nodes in range(1, gpus)]).dump().values()
    assert record.count(b"[1.0]") == PLACEMENTS_MAX


def test_options_that_make_no_sense_are_all_named() -> None:
    wrong = {"kinds_max": "0", "confidence_min": "2", "others_trust": "-1", "slowdown": "0.5"}
    with pytest.raises(BadOption) as caught:
        parse(Scaling.Options, wrong)
    assert {violation.field for violation in caught.value.violations} == set(wrong)


def test_features_are_those_of_the_form() -> None:
    assert features(1, 1, "ring", batch_is_fixed=False) == (1.0, 0.0, 0.0)
    assert features(8, 4, "log", batch_is_fixed=True) == (1.0, 0.125, 1.0, 2.0)


def test_a_job_without_a_wanted_type_is_judged_on_the_type_that_was_seen_in_most_placements() -> None:
    seen = Seen()
    assert (seen.gpu_type(""), seen.gpu_type("H100")) == ("", "H100")
    for gpu_type, nodes in (("T4", 1), ("A100", 1), ("A100", 2)):
        seen.add(gpu_type, (2, nodes, False), 4, 1.0)
    assert (seen.gpu_type(""), seen.gpu_type("T4")) == ("A100", "T4")


def test_a_fit_that_says_nothing_of_one_gpu_takes_the_slowdown_of_shares_as_configured() -> None:
    """Where steps seem to consist of communication alone, a step on one GPU would take no time."""
    whole = [timed(1.0, 2), timed(2.0, 4), timed(3.0, 8)]
    shared = [timed(2.0, 1, gpu_milli=500), timed(9.0, 2, gpu_milli=1000)]
    predictor = taught(*whole, *shared, batch="per-gpu", slowdown="1.5")
    alone, _ = seconds_and_confidence(predictor, 4, 1)
    beside, _ = seconds_and_confidence(predictor, 4, 1, gpu_milli=2000)
    assert alone == pytest.approx(2.0, rel=0.01)
    assert beside == pytest.approx(1.5 * alone, rel=0.01)
