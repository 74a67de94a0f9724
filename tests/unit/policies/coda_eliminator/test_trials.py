"""When a trial is over, and what it has shown: the bounds of gain, of doubt and of patience."""

from __future__ import annotations

import math

import pytest

from cotenant.core.policy.protocols import FREE, AttemptWindow, NodeWindow
from cotenant.policies.coda_eliminator.baselines import NOISE_MIN, Baseline
from cotenant.policies.coda_eliminator.ladder import rungs
from cotenant.policies.coda_eliminator.node_state import RATE, Victim
from cotenant.policies.coda_eliminator.relief import Relief
from cotenant.policies.coda_eliminator.throttled_jobs import Hold, Trial

DNN = AttemptWindow("dnn", 1, False, 8.0, 7.0, cores=8)
ONE, TWO = (AttemptWindow(name, 1, True, 8.0, cores=8) for name in ("one", "two"))
WINDOW = NodeWindow("n", 1000.0, 5.0, (DNN, ONE, TWO))
TINY = 1e-9


def outcome(gain: float, windows: int, *, loss: float = 0.3, noise: float = NOISE_MIN, together: bool = False) -> str:
    """Return what a trial has shown after some windows in which the victim regained this much of its rate.

    The loss was seen in as many windows as that.
    """
    baseline = Baseline(rate=10.0, windows=10**6, trusted=True)
    baseline._squares = (noise**2 * 132 - 0.05**2 * 12) / 120  # so that this is its noise
    assert baseline.noise == pytest.approx(noise)
    relief, both = Relief(), (("one", 1), ("two", 1))
    suspects = both if together else both[:1]
    relief.state.cpu = {("one", 1): ONE, ("two", 1): TWO}
    for id in suspects:
        ladder = rungs(ONE, WINDOW)
        relief.throttled.holds[id] = Hold(ladder, 8, 1, ladder[1].throttle, 60.0, 900.0)
    left = (loss - gain) * windows
    trial = Trial(("dnn", 1), suspects, loss, windows, 900.0, windows, left, suspects if together else ())
    relief.trial = trial
    relief._watch_trial(trial, Victim(DNN, baseline, RATE), WINDOW)
    released = {id for id, directive in relief.throttled.directives.items() if directive.throttle == FREE}
    proven = {id for id, hold in relief.throttled.holds.items() if hold.proven}
    assert released in (set(), set(suspects))
    assert proven in (set(), set(suspects))
    assert all(relief.throttled.holds[id].untested == together for id in proven)
    return "released" if released else "proven" if proven else "open"


@pytest.mark.parametrize(("together", "share"), [(False, 0.2), (True, 0.5)])
def test_a_fifth_of_the_loss_proves_a_suspect_and_half_of_it_several_together(together: bool, share: float) -> None:
    enough = 0.3 * share
    assert outcome(enough + TINY, 6, together=together) == "proven"
    assert outcome(enough - TINY, 6, together=together) == "released"


def test_a_gain_must_be_more_than_noise_explains() -> None:
    """Of which nine of ten are smaller than 1.28 standard deviations of the difference of two means."""
    noise, windows = 0.2, 6
    explained = 1.28 * noise * math.sqrt(2 / windows)
    assert explained > 0.2 * 0.3
    assert outcome(explained + TINY, windows, noise=noise) == "proven"
    assert outcome(explained - TINY, windows, noise=noise) == "released"


@pytest.mark.parametrize(("together", "doubts"), [(False, 1), (True, 2)])
def test_a_trial_goes_on_while_its_result_is_in_doubt_for_six_windows_at_most(together: bool, doubts: int) -> None:
    noise, loss = 0.1, 0.1  # for this noise six windows are enough
    for windows in (1, 2, 5, 6):
        unsure = noise * math.sqrt(2 / windows)
        needed = max((0.5 if together else 0.2) * loss, 1.28 * unsure)
        for off in (-doubts * unsure - TINY, -doubts * unsure + TINY, unsure - TINY, unsure + TINY):
            decided = "proven" if off > 0 else "released"
            in_doubt = windows < 6 and abs(off) < (doubts if off < 0 else 1) * unsure
            found = outcome(needed + off, windows, loss=loss, noise=noise, together=together)
            assert found == ("open" if in_doubt else decided), (windows, off)


@pytest.mark.parametrize(("noise", "enough"), [(0.005, 2), (0.06, 2), (0.13, 4), (0.16, 6), (0.5, 6)])
def test_more_noise_takes_more_windows(noise: float, enough: int) -> None:
    """As many as bring the noise of their mean to two fifths of the loss, from two to six."""
    loss = 0.17
    assert enough == max(2, min(6, math.ceil((2.5 * noise / loss) ** 2)))
    for windows in range(1, 7):
        needed = max(0.2 * loss, 1.28 * noise * math.sqrt(2 / windows))
        assert (outcome(needed + TINY, windows, loss=loss, noise=noise) == "open") == (windows < enough)


@pytest.mark.parametrize("windows", [2, 4, 9])
def test_a_proven_attempt_is_throttled_further_while_its_victim_is_slower_than_noise_explains(windows: int) -> None:
    noise = 0.06
    unsure = noise / math.sqrt(windows)  # of a mean
    for off, deeper in ((TINY, True), (-TINY, False)):
        baseline = Baseline(rate=10.0, windows=10**6, trusted=True)
        baseline._squares = (noise**2 * 132 - 0.05**2 * 12) / 120
        relief, ladder = Relief(), rungs(ONE, WINDOW)
        relief.state.cpu = {("one", 1): ONE}
        hold = relief.throttled.holds["one", 1] = Hold(ladder, 8, 0, ladder[0].throttle, 60.0, 900.0, proven=True)
        left = (relief.thresholds.slowdown + unsure + off) * windows
        relief.trial = trial = Trial(("dnn", 1), (("one", 1),), 0.5, windows, 900.0, windows, left, ())
        relief._watch_proven(trial, Victim(DNN, baseline, RATE), WINDOW)
        assert (hold.rung > 0) == deeper
