"""Which resource of a node is short, and what of the past counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.core.policy.protocols import AttemptWindow, NodeWindow
from cotenant.policies.coda_eliminator.node_state import (
    EXPOSURE,
    EXPOSURE_SHARE,
    GAP_WINDOWS,
    OTHERS_CORES,
    OTHERS_SHARE,
    NodeState,
)
from cotenant.policies.coda_eliminator.suspects import ONSET_WINDOWS
from cotenant.policies.coda_eliminator.thresholds import THRESHOLDS

DNN = AttemptWindow("dnn", 1, False, 8.0, 10.0, cores=8)
CPU = AttemptWindow("cpu", 1, True, 0.0, cores=8)
CALM = NodeWindow("n", 5.0, 5.0, (DNN, CPU), memory_bandwidth_peak_bytes_per_second=200.0)


def after(*windows: NodeWindow) -> NodeState:
    state = NodeState(THRESHOLDS)
    for window in windows:
        state.update(window, throttled=False)
    return state


@pytest.mark.parametrize(
    ("figure", "most", "what"),
    [
        ("memory_bandwidth_bytes_per_second", 2 * THRESHOLDS.bandwidth_percent, "memory bandwidth"),
        ("memory_some_percent", THRESHOLDS.memory_percent, "for memory"),
        ("io_some_percent", THRESHOLDS.io_percent, "for storage"),
        ("cpu_some_percent", THRESHOLDS.cpu_percent, "for a CPU"),
    ],
)
def test_a_resource_is_short_above_its_threshold(figure: str, most: float, what: str) -> None:
    state = after(CALM)
    assert state.pressure(replace(CALM, **{figure: most})) == ""  # type: ignore[arg-type]  # by name
    assert what in state.pressure(replace(CALM, **{figure: most + 0.1}))  # type: ignore[arg-type]  # by name


def test_bandwidth_is_a_share_of_a_known_peak() -> None:
    state, busy = after(CALM), replace(CALM, memory_bandwidth_bytes_per_second=50.0)
    assert state.bandwidth_percent(busy) == 25.0
    assert state.bandwidth_percent(CALM) is None
    for peak in (None, 0.0):
        assert state.bandwidth_percent(replace(busy, memory_bandwidth_peak_bytes_per_second=peak)) is None


@pytest.mark.parametrize(
    ("resource", "most", "concerned"),
    [("memory", THRESHOLDS.memory_percent, [DNN]), ("cpu", THRESHOLDS.cpu_percent, [DNN, CPU])],
)
def test_waits_count_if_an_attempt_that_they_concern_waits_or_may_wait(
    resource: str, most: float, concerned: list[AttemptWindow]
) -> None:
    """For memory these are the possible victims, for a CPU all attempts."""
    own = f"{resource}_some_percent"
    pressed = replace(CALM, **{own: 99.0})  # type: ignore[arg-type]  # by name
    for waiting in (DNN, CPU):
        for wait, waits in ((most, False), (most + 0.1, True), (None, True)):
            here = tuple(replace(one, **{own: wait if one is waiting else 0.0}) for one in (DNN, CPU))  # type: ignore[arg-type]  # by name
            window = replace(pressed, attempts=here)
            assert bool(after(window).pressure(window)) == (waits and waiting in concerned)


def test_more_outside_processes_than_usual_explain_waits_for_a_cpu() -> None:
    usual = replace(CALM, cores_of_others=2.0)
    pressed = replace(usual, cpu_some_percent=99.0)
    for more, explained in ((OTHERS_CORES, True), (OTHERS_CORES - 0.01, False)):
        window = replace(pressed, cores_of_others=2.0 + more)
        assert (after(usual).pressure(window) == "") == explained
    state = after(usual, replace(usual, now=10.0, cores_of_others=6.0))
    assert state.others == pytest.approx(2.0 + OTHERS_SHARE * 4.0)


@pytest.mark.parametrize("late", [-0.4, 0.0, 0.4])
def test_an_onset_counts_for_six_windows_even_if_windows_are_somewhat_early_or_late(late: float) -> None:
    state, named = after(CALM), []
    for number in range(1, 2 * ONSET_WINDOWS):
        now = 5.0 * (number + 1 + late * (number > 1))
        state.update(replace(CALM, now=now, attempts=(DNN, replace(CPU, cores_used=8.0))), throttled=False)
        named.append(state.onset.startswith("cpu began to use much more"))
    assert named == [number < ONSET_WINDOWS for number in range(len(named))]


def test_the_latest_onset_is_the_one_that_is_named() -> None:
    other = replace(CPU, job_id="a-first")
    state = after(replace(CALM, attempts=(DNN, CPU, other)))
    for now, uses in ((10.0, (0.0, 8.0)), (15.0, (8.0, 8.0))):
        here = tuple(replace(one, cores_used=used) for one, used in zip((CPU, other), uses, strict=True))
        state.update(replace(CALM, now=now, attempts=(DNN, *here)), throttled=False)
    assert state.onset.startswith("cpu ")


def test_after_a_long_silence_the_past_does_not_count_and_a_shorter_one_changes_nothing() -> None:
    busy = replace(CALM, attempts=(DNN, replace(CPU, cores_used=8.0)))
    silence = GAP_WINDOWS * CALM.seconds
    state = after(CALM, replace(busy, now=5.0 + silence))
    assert (state.began, bool(state.onset), len(state.usages["cpu", 1].recent)) == (5.0, True, 2)
    state = after(CALM, replace(busy, now=5.0 + silence + 0.1))
    assert (state.began, state.onset, len(state.usages["cpu", 1].recent)) == (5.0 + silence + 0.1, "", 1)


def test_a_job_that_comes_later_begins_to_use_its_cores_and_one_of_the_first_window_always_did() -> None:
    busy = replace(CPU, cores_used=8.0)
    assert after(replace(CALM, attempts=(DNN, busy))).onset == ""
    assert after(replace(CALM, attempts=(DNN,)), replace(CALM, now=10.0, attempts=(DNN, busy))).onset


def test_a_job_that_has_reported_a_rate_is_never_judged_by_its_utilization() -> None:
    silent = replace(DNN, rate_per_second=None, gpu_utilisation_percent=90.0)
    state = after(replace(CALM, attempts=(silent,)))
    assert [one.what for one in state.steady.values()] == ["GPU utilisation"]
    state = after(CALM, replace(CALM, now=10.0, attempts=(silent,)))
    assert state.steady == {}


def test_the_share_of_windows_near_an_onset_is_their_weighted_mean() -> None:
    state = after(CALM)
    expected = (1 - EXPOSURE_SHARE) * NodeState(THRESHOLDS).exposure
    assert state.exposure == pytest.approx(expected)
    for number in range(3 * ONSET_WINDOWS):
        busy = replace(CALM, now=10.0 + 5.0 * number, attempts=(DNN, replace(CPU, cores_used=8.0)))
        state.update(busy, throttled=False)
        near = number < ONSET_WINDOWS
        assert bool(state.onset) == near
        expected = (1 - EXPOSURE_SHARE) * expected + EXPOSURE_SHARE * near
        assert state.exposure == pytest.approx(expected)


def test_the_more_often_onsets_are_near_the_more_evidence_a_fall_near_one_needs() -> None:
    def evidence(exposure: float, onset: str = "cpu") -> float:
        state = NodeState(THRESHOLDS, onset=onset, exposure=exposure)
        for number in range(60):
            noisy = replace(DNN, rate_per_second=8.0 + 2.0 * (number % 3))
            state._judge(CALM, {("dnn", 1): noisy}, throttled=False)
        (baseline,) = state.baselines["dnn", 1].values()
        return baseline._h

    found = [evidence(exposure) for exposure in (EXPOSURE / 10, EXPOSURE, 10 * EXPOSURE, 0.5)]
    assert found[0] == found[1], "below the minimum it makes no difference"
    assert found[1] < found[2] < found[3] < evidence(0.5, onset="")
    assert evidence(EXPOSURE, onset="") == evidence(0.5, onset="")
