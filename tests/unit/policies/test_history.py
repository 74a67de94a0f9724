from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.core.policy.options import BadOption, parse
from cotenant.policies.history import History


def ran(seconds: float, user: str = "ann", model: str = "bert", *, succeeded: bool = True) -> Observation:
    return Observation(user, model, "", 1000, 1, Candidate(4, 1000), run_seconds=seconds, succeeded=succeeded)


def paced(rate: float, cores: int = 4, gpu_type: str = "", model: str = "bert") -> Observation:
    allocation = Candidate(cores, 1000, gpu_type=gpu_type)
    return Observation("ann", model, "", 1000, 1, allocation, rate_per_second=rate, window_seconds=60.0)


def taught(*seen: Observation, **options: str) -> History:
    history = History(parse(History.Options, options))
    for observation in seen:
        history.observe(observation)
    return history


def asked(history: History, **about: object) -> Estimate:
    query = {"user": "ann", "model": "bert", "name": "", "gpu_milli": 1000, "replicas": 1, **about}
    return history.estimate(Query(**query))  # type: ignore[arg-type]  # by name


def test_one_wild_run_does_not_move_the_median() -> None:
    runs = [ran(seconds) for seconds in (98, 99, 100, 100, 101, 102, 100, 99, 101, 10_000)]
    assert asked(taught(*runs)).remaining_seconds == 100.0


def test_a_gpu_type_with_cores_undecided_has_the_rate_on_its_best_cores() -> None:
    history = taught(*[paced(10.0, 2, "T4"), paced(18.0, 4, "T4"), paced(40.0, 8, "A100")] * 3)
    candidates = [Candidate(0, 1000, gpu_type=kind) for kind in ("T4", "A100", "V100")]
    judged = asked(history, candidates=(*candidates, Candidate(0, 1000), Candidate(3, 1000, gpu_type="T4"))).candidates
    assert [one.rate_per_second for one in judged] == [18.0, 40.0, None, None, None]


def test_only_successes_count_as_run_times() -> None:
    assert not asked(taught(*[ran(5.0, succeeded=False)] * 9)).predictable


def test_jobs_of_other_users_models_and_sizes_are_ignored() -> None:
    history = taught(*[ran(100.0)] * 4)
    assert asked(history).predictable
    for other in ({"user": "bob"}, {"model": "gnmt"}, {"gpu_milli": 2000}, {"replicas": 2}):
        assert not asked(history, **other).predictable


def test_a_job_without_a_model_is_known_by_its_name() -> None:
    nameless = Observation("ann", "", "nightly", 1000, 1, Candidate(4), run_seconds=60.0, succeeded=True)
    history = taught(nameless, nameless, nameless)
    assert asked(history, model="", name="nightly").remaining_seconds == 60.0
    assert not asked(history, model="", name="other").predictable


def test_a_running_job_is_compared_with_longer_runs() -> None:
    history = taught(*[ran(10.0)] * 5, *[ran(1000.0)] * 5)
    assert asked(history, run_seconds=50.0).remaining_seconds == 950.0


def test_a_job_that_outlives_all_of_its_kind_is_unpredictable_again() -> None:
    estimate = asked(taught(*[ran(100.0)] * 8), run_seconds=100.0)
    assert (estimate.predictable, estimate.remaining_seconds) == (False, None)
    assert estimate.source == "it has outlived 8 similar runs"


def test_more_runs_and_a_smaller_spread_make_surer() -> None:
    few, many = asked(taught(*[ran(100.0)] * 3)), asked(taught(*[ran(100.0)] * 9))
    wide = asked(taught(*[ran(100.0 + 10 * n) for n in range(9)]))
    assert few.confidence < many.confidence
    assert wide.confidence < many.confidence
    assert not asked(taught(ran(100.0))).predictable
    assert asked(taught(ran(100.0))).source == "1 similar run: too few or too different"


def test_steps_that_are_left_decide_where_the_rate_is_known() -> None:
    history = taught(*[paced(2.0)] * 6, *[ran(9.0)] * 6)
    estimate = asked(history, cores=4, step=100, steps_total=1100)
    assert estimate.remaining_seconds == 500.0
    assert estimate.source == "1000 steps left at 2 per second, the median of 6"
    assert asked(history, cores=5, step=100, steps_total=1100).remaining_seconds == 9.0


def test_a_hint_serves_where_nothing_else_is_known_and_until_it_is_wrong() -> None:
    estimate = asked(History(), expected_seconds=600.0, run_seconds=100.0)
    assert (estimate.predictable, estimate.remaining_seconds, estimate.confidence) == (True, 500.0, 0.25)
    assert estimate.source == "its user expects 600 s in total"
    assert not asked(History(), expected_seconds=600.0, run_seconds=600.0).predictable
    assert asked(taught(*[ran(100.0)] * 4), expected_seconds=600.0).remaining_seconds == 100.0


def test_theta_is_the_fewest_cores_within_two_percent_of_the_best() -> None:
    seen = [paced(rate, cores) for cores, rate in ((2, 5.0), (4, 9.85), (8, 10.0), (16, 9.9))]
    assert asked(taught(*seen)).cores_useful == 4
    assert asked(taught(*seen[:2])).cores_useful is None
    assert asked(taught(*seen), gpu_type="A100").cores_useful is None


def test_rates_are_kept_by_gpu_type_and_the_best_known_is_the_default() -> None:
    history = taught(paced(9.0, gpu_type="A100"), paced(1.0, gpu_type="T4"), paced(1.2, gpu_type="T4"))
    judged = asked(
        history, candidates=(Candidate(4, gpu_type="A100"), Candidate(4, gpu_type="T4"), Candidate(4), Candidate(9))
    ).candidates
    assert [estimate.rate_per_second for estimate in judged] == [9.0, 1.1, 1.1, None]


def test_a_candidate_has_a_remaining_time_if_steps_are_known() -> None:
    (judged,) = asked(taught(paced(4.0)), steps_total=400, candidates=(Candidate(4),)).candidates
    assert (judged.rate_per_second, judged.remaining_seconds) == (4.0, 100.0)


def test_the_latest_samples_are_kept_and_the_kinds_used_last() -> None:
    history = taught(*[ran(1.0)] * 5, *[ran(9.0)] * 3, samples_max="3")
    assert asked(history).remaining_seconds == 9.0
    small = taught(*[ran(1.0, "ann")] * 3, *[ran(2.0, "bob")] * 3, kinds_max="2")
    asked(small, user="ann")
    small.observe(ran(3.0, "cyd"))
    assert asked(small, user="ann").predictable
    assert not asked(small, user="bob").predictable


def test_what_is_forgotten_is_dumped_as_nothing() -> None:
    history = taught(ran(1.0, "ann"), kinds_max="1")
    kept = history.dump()
    history.observe(ran(2.0, "bob"))
    changed = history.dump()
    assert [changed[name] for name in kept] == [b""]
    assert len(changed) == 2
    assert History().restore(changed) == []


def test_a_core_count_beyond_the_limit_replaces_the_oldest() -> None:
    history = taught(*[paced(1.0, cores) for cores in range(1, 6)], samples_max="3")
    (record,) = history.dump().values()
    assert [cores for _, cores, _, _ in json.loads(record)["rates"]] == [3, 4, 5]


def test_a_zero_is_ignored_and_not_recorded() -> None:
    assert taught(ran(0.0), paced(0.0)).dump() == {}


@pytest.mark.parametrize(
    "record",
    [
        b"{}",
        b"[]",
        b'{"key":["a","b","1"],"runs":[],"rates":[]}',
        b'{"key":["a","b","1","1"],"runs":[-1],"rates":[]}',
        b'{"key":["a","b","1","1"],"runs":[NaN],"rates":[]}',
        b'{"key":["a","b","1","1"],"runs":[1],"rates":[["",1,["x"]]]}',
        b'{"key":["a","b","1","1"],"runs":7,"rates":[]}',
        b'{"key":{},"runs":[],"rates":[]}',
    ],
)
def test_a_record_that_is_no_profile_is_named_and_the_others_are_read(record: bytes) -> None:
    good = taught(*[ran(100.0)] * 4).dump()
    history = History()
    assert history.restore({"bad": record, **good}) == ["bad"]
    assert asked(history).remaining_seconds == 100.0


def test_options_that_make_no_sense_are_all_named() -> None:
    wrong = {"kinds_max": "0", "samples_max": "0", "core_counts_min": "0", "confidence_min": "2", "tolerance": "-0.1"}
    with pytest.raises(BadOption) as caught:
        parse(History.Options, wrong)
    assert {violation.field for violation in caught.value.violations} == set(wrong)


def test_rates_are_kept_by_number_of_nodes() -> None:
    history = History()
    for nodes, rate in ((1, 4.0), (1, 4.0), (2, 3.0)):
        seen = Candidate(4, nodes=nodes)
        history.observe(Observation("ann", "bert", "", 2000, 2, seen, rate_per_second=rate, window_seconds=10.0))
    asked = Query(
        "ann", "bert", "", 2000, 2, cores=4, candidates=tuple(Candidate(4, nodes=nodes) for nodes in (1, 2, 4))
    )
    assert [one.rate_per_second for one in history.estimate(asked).candidates] == [4.0, 3.0, None]
    restarted = History()
    assert restarted.restore(history.dump()) == []
    assert restarted.estimate(asked) == history.estimate(asked)


def test_records_without_nodes_are_read() -> None:
    history = History()
    record = b'{"key":["ann","bert","1000","1"],"runs":[],"rates":[["",4,[2.0,2.0]]]}'
    assert history.restore({"k": record}) == []
    asked = Query("ann", "bert", "", 1000, 1, candidates=(Candidate(4),))
    assert history.estimate(asked).candidates[0].rate_per_second == 2.0


def test_an_answer_is_not_given_again_once_something_else_was_seen() -> None:
    history = History()
    asked = Query("ann", "bert", "", 1000, 1, candidates=(Candidate(4),))
    told = []
    for rate in (2.0, 8.0, 8.0):
        history.observe(
            Observation("ann", "bert", "", 1000, 1, Candidate(4), rate_per_second=rate, window_seconds=10.0)
        )
        told += [history.estimate(asked).candidates[0].rate_per_second for _ in range(2)]
    assert told == [2.0, 2.0, 5.0, 5.0, 8.0, 8.0]


Percentiles = tuple[float, float, float, float]  # the 10th, 50th and 90th, and the confidence
TYPES = st.sampled_from(["", "A100", "T4"])
windows = st.builds(
    Observation,
    *map(st.just, ("ann", "bert", "", 1000, 1)),
    st.builds(Candidate, st.integers(1, 4), st.just(1000), st.integers(1, 2), TYPES),
    rate_per_second=st.none() | st.sampled_from([1.0, 1.97, 2.0, 3.0]),
    run_seconds=st.none() | st.sampled_from([10.0, 11.0, 12.0, 90.0]),
    succeeded=st.sampled_from([True, True, False]),
    phase=st.sampled_from(["", "", "eval"]),
)
queries = st.builds(
    Query,
    *map(st.just, ("ann", "bert", "", 1000, 1)),
    cores=st.none() | st.integers(1, 4),
    gpu_type=TYPES,
    run_seconds=st.sampled_from([0.0, 0.0, 10.0, 50.0]),
    step=st.sampled_from([0, 40]),
    steps_total=st.sampled_from([0, 40, 60]),
    expected_seconds=st.none() | st.sampled_from([10.0, 50.0, 51.0]),
    phase=st.sampled_from(["", "", "eval"]),
    candidates=st.lists(
        st.builds(Candidate, st.integers(1, 4), st.just(1000), st.integers(1, 2), TYPES), max_size=2
    ).map(tuple),
)


def percentiles(figures: Sequence[float]) -> Percentiles:
    low, quarter, middle, more, high = np.percentile(figures, [10, 25, 50, 75, 90])
    return low, middle, high, len(figures) / (len(figures) + 2) / (1 + (more - quarter) / middle)


def by_hand(seen: Sequence[Observation], query: Query) -> tuple[list[float | None], int | None]:
    """The slow twin: percentiles of all that was seen, for each question anew.

    Returns the confidence, the remaining time with its percentiles, and three figures of each candidate; and θ.
    """
    runs = [one.run_seconds for one in seen if one.run_seconds and one.succeeded]
    rates: dict[str, dict[tuple[int, int], list[float]]] = {}
    for one in seen if query.phase == "" else ():
        if one.rate_per_second and one.phase == "":
            by_cores = rates.setdefault(one.allocation.gpu_type, {})
            by_cores.setdefault((one.allocation.cores, one.allocation.nodes), []).append(one.rate_per_second)
    usual = max(sorted(rates), key=lambda kind: sum(map(len, rates[kind].values())), default="")
    here, steps = rates.get(query.gpu_type or usual, {}), max(0, query.steps_total - query.step)
    middles = {held: percentiles(some)[1] for held, some in here.items()}
    if query.cores is None:
        fitting = [some for held, some in sorted(here.items()) if middles[held] == max(middles.values())]
    else:
        on = [(-len(some), nodes, some) for (cores, nodes), some in here.items() if cores == query.cores]
        fitting = [some for _, _, some in sorted(on)]
    longer = [seconds for seconds in runs if seconds > query.run_seconds]
    sure, figures = 0.0, list[float | None]()
    if steps and fitting:
        low, middle, high, sure = percentiles(fitting[0])
        figures = [sure, steps / middle, steps / high, steps / low]
    elif longer:
        low, middle, high, sure = percentiles(longer)
        figures = [sure, *(seconds - query.run_seconds for seconds in (middle, low, high))]
    if sure < 0.5:
        left = (query.expected_seconds or 0.0) - query.run_seconds
        figures = [0.25, left, None, None] if left > 0 else [0.0, None, None, None]
    for wanted in query.candidates:
        figures_there = rates.get(wanted.gpu_type or usual, {}).get((wanted.cores, wanted.nodes))
        _, rate, _, sure = percentiles(figures_there) if figures_there else (0.0, 0.0, 0.0, 0.0)
        figures += [rate or None, steps / rate if rate and steps else None, sure]
    seen_on = Counter(nodes for _, nodes in here)
    most = min(seen_on, key=lambda nodes: (-seen_on[nodes], nodes), default=0)
    there = {cores: middle for (cores, nodes), middle in middles.items() if nodes == most}
    if len(there) < 3:
        return figures, None
    return figures, min(cores for cores, rate in there.items() if rate >= 0.98 * max(there.values()))


@given(st.lists(windows, max_size=20), queries)
def test_an_estimate_is_of_the_percentiles_of_all_that_was_seen(seen: list[Observation], query: Query) -> None:
    told = taught(*seen).estimate(query)
    figures = [told.confidence, told.remaining_seconds, told.remaining_p10_seconds, told.remaining_p90_seconds]
    for one in told.candidates:
        figures += [one.rate_per_second, one.remaining_seconds, one.confidence]
    expected, useful = by_hand(seen, query)
    assert figures == pytest.approx(expected)
    assert (told.predictable, told.cores_useful) == (told.remaining_seconds is not None, useful)
