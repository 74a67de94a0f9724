"""Each model of the physics against the figures of its source."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.paths import SHARED_DATA as SHARED

from cotenant.core.model.model_name import FAMILIES, Model, model_of
from cotenant.core.model.node import NodeShape
from cotenant.core.placement import interference
from cotenant.simulator.physics import bandwidth, cores, costs, failures, gpus, locality, utilisation
from cotenant.simulator.traces import TraceJob, workers
from cotenant.simulator.traces.trace_job import Ended

GB = 1e9


def known(tag: str) -> Model:
    model = model_of(tag)
    assert model is not None
    return model


# papers.md, section 5: speed relative to 3 cores per GPU, at 62.5 GB
SYNERGY = {
    "alexnet": (0.30, 0.66, 1, 1.25, 1.53, 1.75, 2, 2, 2),
    "res18": (0.37, 0.72, 1, 1.3, 1.53, 1.75, 2.4, 2.4, 2.4),
    "mobilenet": (0.37, 0.72, 1, 1.3, 1.49, 1.55, 1.55, 1.55, 1.55),
    "res50": (0.40, 0.74, 1, 1.15, 1.15, 1.15, 1.15, 1.15, 1.15),
    "deepspeech": (0.30, 0.66, 1, 1, 1, 1, 1, 1, 1),
    "bert": (1,) * 9,
    "gnmt": (1,) * 9,
    "lstm": (1,) * 9,
    "transformer": (1,) * 9,
}


@pytest.mark.parametrize("name", SYNERGY)
def test_speed_by_cores_is_what_synergy_measured(name: str) -> None:
    speeds = [cores.speed(known(name), gpus=1, cores_per_gpu=count) for count in (1, 2, 3, 4, 5, 6, 9, 12, 24)]
    assert speeds == pytest.approx(SYNERGY[name])


def test_more_memory_lets_alexnet_use_twelve_cores_and_little_memory_starves_it() -> None:
    alexnet = known("AlexNet")
    assert cores.speed(alexnet, gpus=1, cores_per_gpu=12, memory_bytes_per_gpu=125 * GB) == 2.94
    assert cores.speed(alexnet, gpus=1, cores_per_gpu=12, memory_bytes_per_gpu=10 * GB) == 0.1
    between = cores.speed(alexnet, gpus=1, cores_per_gpu=12, memory_bytes_per_gpu=93.75 * GB)
    assert between == pytest.approx((2.0 + 2.94) / 2)


def test_what_was_impossible_on_the_measured_machine_counts_as_its_last_core_count() -> None:
    alexnet = known("alexnet")
    assert cores.speed(alexnet, gpus=4, cores_per_gpu=24) == 1.75
    assert cores.speed(alexnet, gpus=16, cores_per_gpu=24) == 1.75
    assert cores.speed(alexnet, gpus=2, cores_per_gpu=9) == 2.33


@pytest.mark.parametrize(
    ("name", "sweet"),
    [("LeNet", 20), ("OverFeat", 22), ("GoogLeNet", 11), ("language model", 1), ("Bi-Att-Flow", 8), ("WaveNet", 3)],
)
def test_a_model_that_only_xiao_knows_gains_up_to_its_sweet_point_and_no_further(name: str, sweet: int) -> None:
    speeds = [cores.speed(known(name), gpus=1, cores_per_gpu=count) or 0 for count in (*range(1, sweet + 1), 48)]
    assert speeds[-1] == speeds[-2]
    assert all(after > before for before, after in itertools.pairwise(speeds[:-1]))
    assert cores.speed(known(name), gpus=1, cores_per_gpu=3) == 1


@given(st.sampled_from(FAMILIES), st.integers(1, 16), st.floats(0.1, 64), st.floats(0.1, 64), st.floats(0, 300))
def test_more_cores_never_slow_a_job_down(family: str, count: int, few: float, many: float, memory_gb: float) -> None:
    few, many = sorted((few, many))
    low, high = (
        cores.speed(known(family), gpus=count, cores_per_gpu=each, memory_bytes_per_gpu=memory_gb * GB)
        for each in (few, many)
    )
    assert (low is None) == (high is None)
    assert low is None or high is None or 0 < low <= high + 1e-9


@pytest.mark.skipif(not (SHARED / "synergy").is_dir(), reason="the published profiles are not here")
def test_the_bundled_tables_equal_the_published_files() -> None:
    published = json.loads((SHARED / "synergy" / "cpu_mem_sensitivity_profiles.json").read_text())
    for profile in published.values():
        model = known(profile["name"].rpartition("_")[0])
        for count, row in zip((1, 2, 3, 4, 5, 6, 9, 12, 24), profile["tput"], strict=True):
            for size, speed in zip((20.83, 62.5, 125, 187.5, 250)[-len(row) :], row, strict=True):
                if all(row):
                    told = cores.speed(model, gpus=profile["gpus"], cores_per_gpu=count, memory_bytes_per_gpu=size * GB)
                    assert told == pytest.approx(speed), (profile["name"], count, size)
    gavel = json.loads((SHARED / "gavel" / "simulation_throughputs.json").read_text())
    for text, rates in gavel["v100"].items():
        title, scale = text[2:].rsplit("', ", 1)
        other = gavel["k80"][text]["null"]
        if other:
            told = gpus.relative_speed(known(title), int(scale[:-1]), "K80", "V100")
            assert told == pytest.approx(other / rates["null"], rel=1e-3), text


def test_speed_by_type_is_relative_to_the_type_of_the_trace_and_unknown_types_are_not_guessed() -> None:
    resnet = known("ResNet-50 (batch size 32)")
    assert gpus.relative_speed(resnet, 1, "Tesla K80", "Tesla V100-SXM2") == pytest.approx(1.237 / 7.785, rel=2e-3)
    assert gpus.relative_speed(resnet, 1, "V100", "v100") == 1
    assert gpus.relative_speed(resnet, 1, "A100", "V100") is None
    assert gpus.relative_speed(known("vgg16"), 1, "K80", "V100") is None


def test_a_gang_apart_is_as_fast_as_gavel_measured_and_never_faster_than_together() -> None:
    assert gpus.apart(known("LM (batch size 5)"), 2, "V100") == pytest.approx(40.35 / 185.7, rel=1e-3)
    assert gpus.apart(known("ResNet-18 (batch size 256)"), 2, "V100") == 1  # measured as 1.24
    assert gpus.apart(known("ResNet-18 (batch size 32)"), 64, "P100") == gpus.apart(
        known("ResNet-18 (batch size 32)"), 8, "P100"
    )


def test_an_unmeasured_pair_on_one_gpu_leaves_the_median_of_the_measured_ones() -> None:
    table = json.loads((Path(gpus.__file__).parents[1] / "data" / "gavel_speeds.json").read_text())["pairs"]
    for kind, left in (("k80", 0.536), ("p100", 0.588), ("v100", 0.679)):
        assert median(one for row in table[kind] for one in row if one) == pytest.approx(left, abs=1e-3)
        assert gpus.beside(None, known("vgg"), kind) == pytest.approx(left, abs=1e-3)
    assert gpus.beside(known("LM (batch size 5)"), known("A3C"), "v100") <= 1


def test_a_gang_of_an_unknown_model_is_as_fast_as_phillys_on_one_and_two_servers_and_more() -> None:
    distances = locality.Distances([NodeShape(8, 24)] * 16, ["a"] * 8 + ["b"] * 8)
    assert distances.speed(None, 2, "", [0]) == 1
    assert distances.speed(None, 2, "", [0, 1]) == pytest.approx(98.0 / 114.8)
    assert distances.speed(None, 2, "", [0, 8]) == pytest.approx((98.0 / 114.8) ** 2)
    for servers, percent in ((2, 43.66), (4, 40.94), (8, 28.56)):
        assert distances.speed(None, 16, "", range(servers)) == pytest.approx(percent / 43.66)
    assert distances.speed(None, 128, "", range(16)) == 1  # it needs all of them


def test_gangs_on_one_server_slow_each_other_as_philly_measured() -> None:
    assert interference.speed(6, 6, servers=1) == pytest.approx(75.6 / 114.8)
    assert interference.speed(6, 6, servers=2) == pytest.approx(74.1 / 98.0)
    assert interference.speed(0, 0, servers=1) == 1


def test_contention_at_twice_the_peak_costs_a_training_job_the_40_percent_that_kelp_measured() -> None:
    assert bandwidth.speed(2, 1, bandwidth.SENSITIVITY) == pytest.approx(0.6, abs=1e-3)
    assert bandwidth.speed(1, 1, 1) == 1


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=9), st.floats(1e9, 1e12))
def test_what_is_granted_is_no_more_than_the_peak_and_no_more_than_was_wanted(
    demands: list[float], peak: float
) -> None:
    got = [bandwidth.granted(one, math.fsum(demands), peak) for one in demands]
    assert math.fsum(got) <= peak * (1 + 1e-6) or math.fsum(demands) <= peak
    assert all(one <= wanted * (1 + 1e-8) for one, wanted in zip(got, demands, strict=True))


def test_utilisation_is_what_philly_reports_for_each_size_and_outcome() -> None:
    rows = {1: (53.51, 37.02, 62.82), 4: (51.13, 34.39, 50.95), 8: (51.09, 60.63, 64.34), 16: (44.88, 36.98, 39.02)}
    for size, percents in rows.items():
        assert [100 * utilisation.base(size, ended) for ended in Ended] == pytest.approx(percents)
    assert utilisation.base(0.5, Ended.PASSED) == 0.5351


def test_costs_span_the_published_ranges_and_an_unknown_model_is_in_the_middle() -> None:
    prices = [costs.cost(known(family)) for family in FAMILIES]
    assert (min(one.save_seconds for one in prices), max(one.save_seconds for one in prices)) == (0.2, 5.4)
    assert (min(one.restart_seconds for one in prices), max(one.restart_seconds for one in prices)) == (4.0, 94.0)
    assert costs.cost(None) == costs.Cost(1.03923048, 19.3907194)


def test_run_times_to_failure_have_the_published_quantiles() -> None:
    for one in failures.CLASSES:
        assert [one.seconds(p) / 60 for p in (0.5, 0.9, 0.95)] == pytest.approx(one.minutes)
        assert 0 < one.seconds(0.0) <= one.seconds(0.3) <= one.seconds(0.5) <= one.seconds(0.97) < math.inf


def test_fates_have_the_published_shares() -> None:
    job = TraceJob("a", 0, 1e9, workers(1))
    fates = [failures.Fates(1, retries="philly").draw(job, number) for number in range(4000)]
    ends = [fate.ended for fate in fates]
    assert ends.count(Ended.FAILED) / 4000 == pytest.approx(0.172, abs=0.02)
    assert ends.count(Ended.KILLED) / 4000 == pytest.approx(0.135, abs=0.02)
    trials = [len(fate.trials_seconds) for fate in fates if fate.ended is Ended.FAILED]
    assert np.mean(trials) == pytest.approx(2.3, abs=0.1)
    oom = [fate for fate in fates if fate.failure and fate.failure.name == "cpu_out_of_memory"]
    assert len(oom) / len(trials) == pytest.approx(12076 / 39772, abs=0.06)


def test_user_errors_are_tried_once_unless_all_failures_are_tried_again() -> None:
    job = TraceJob("a", 0, 1e9, workers(1))
    for number in range(500):
        once, wise, blind = (
            failures.Fates(1, retries=how).draw(job, number) for how in ("none", "transient", "philly")
        )
        assert (once.ended, once.failure) == (wise.ended, wise.failure) == (blind.ended, blind.failure)
        assert once.trials_seconds == blind.trials_seconds[: len(once.trials_seconds)]
        if once.failure:
            assert wise == (blind if once.failure.transient else once)
            assert len(blind.trials_seconds) in (2, 3)


def test_the_word_of_the_trace_counts_more_than_a_draw() -> None:
    for number in range(50):
        for ended in Ended:
            fate = failures.Fates(1).draw(TraceJob("a", 0, 1, workers(1), ended=ended), number)
            assert (fate.ended, fate.work_share, fate.trials_seconds) == (ended, 1.0, ())
