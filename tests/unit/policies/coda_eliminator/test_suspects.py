"""Evidence against CPU jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cotenant.core.policy.protocols import AttemptWindow, NodeWindow, Throttle
from cotenant.policies.coda_eliminator.ladder import SUSPENDED, cores_each, describe, first_rung, rung_of, rungs
from cotenant.policies.coda_eliminator.suspects import Attempt, Usage, ranked, uses

CPU = AttemptWindow("a", 1, cpu_job=True, cores_used=0.0, cores=8)


def seen(**use: list[tuple[float, float, float]]) -> dict[Attempt, Usage]:
    """Usages of jobs from (cores, bandwidth, cache) in windows of 5 s; the last of all ended at 50 s."""
    usages = {}
    for name, windows in use.items():
        usage = usages[name, 1] = Usage()
        for number, (cores, bandwidth, cache) in enumerate(windows):
            window = NodeWindow("n", 50.0 - 5 * (len(windows) - 1 - number), 5.0, ())
            window = replace(window, memory_bandwidth_peak_bytes_per_second=100.0)
            attempt = replace(CPU, cores_used=cores, memory_bandwidth_bytes_per_second=100 * bandwidth)
            rest = replace(CPU, job_id="rest", cache_bytes=100 - 100 * cache)
            window = replace(window, attempts=(replace(attempt, cache_bytes=100 * cache), rest))
            usage.add(uses(window, window.attempts[:1])[0], 8, is_new=len(windows) < 11 and number == 0)
    return usages


def order(usages: dict[Attempt, Usage]) -> list[str]:
    attempts = [replace(CPU, job_id=name) for name, _ in usages]
    return [one.attempt.job_id for one in ranked(usages, attempts, 50.0, 5.0, 16.0)]


def test_a_rise_in_use_counts_more_than_steady_use() -> None:
    steady, rose = [(8.0, 0.6, 0.4)] * 11, [(1.0, 0.1, 0.1)] * 10 + [(6.0, 0.1, 0.1)]
    assert order(seen(steady=steady, rose=rose)) == ["rose", "steady"]


@pytest.mark.parametrize("what", [(5.0, 0.0, 0.0), (0.0, 0.4, 0.0), (0.0, 0.0, 0.4)])
def test_cores_bandwidth_and_cache_all_count(what: tuple[float, float, float]) -> None:
    calm = [(0.0, 0.0, 0.0)] * 11
    assert order(seen(calm=calm, rose=[*calm[:10], what])) == ["rose"]


def test_a_new_job_rose_by_its_whole_use() -> None:
    grew, came = [(2.0, 0.0, 0.0)] * 10 + [(5.0, 0.0, 0.0)], [(4.0, 0.0, 0.0)]
    assert order(seen(grew=grew, came=came)) == ["came", "grew"]


def test_noise_may_hide_the_first_windows_of_a_fall() -> None:
    early = [(0.0, 0.0, 0.0)] * 7 + [(5.0, 0.0, 0.0)] * 4
    assert order(seen(early=early, steady=[(22.0, 0.0, 0.0)] * 11)) == ["early", "steady"]


def test_idle_jobs_are_no_suspects_and_ties_go_by_name() -> None:
    same = [(4.0, 0.0, 0.0)] * 11
    assert order(seen(b=same, a=same, nothing=[(0.1, 0.0, 0.0)] * 11)) == ["a", "b"]


def test_an_onset_is_when_the_use_of_cores_began_to_rise() -> None:
    usages = seen(a=[(0.0, 0.0, 0.0)] * 7 + [(8.0, 0.0, 0.0)] * 4, b=[(4.0, 0.0, 0.0), (4.4, 0.0, 0.0)] * 6)
    assert usages["a", 1].rose == 35.0
    assert usages["b", 1].rose < 0


NODE = NodeWindow("n", 0.0, 5.0, ())
ENFORCED = replace(NODE, bandwidth_enforced=True, memory_bandwidth_peak_bytes_per_second=100.0)


@pytest.mark.parametrize("cores", range(1, 65))
@pytest.mark.parametrize("window", [NODE, ENFORCED])
def test_each_rung_is_harder_and_all_but_the_last_keep_a_tenth(cores: int, window: NodeWindow) -> None:
    for best_effort in (False, True):
        ladder = rungs(replace(CPU, cores=cores, best_effort=best_effort), window)
        shares = [rung.share for rung in ladder]
        assert shares == sorted(shares, reverse=True)
        assert all(share >= 0.1 for share in shares[:-1])
        assert ladder[-1].throttle == SUSPENDED
        assert all(rung.throttle.cores == 0 or 10 * rung.throttle.cores >= cores for rung in ladder)
        assert [rung_of(ladder, rung.throttle) for rung in ladder] == list(range(len(ladder)))
        assert any(rung.throttle.idle for rung in ladder) is best_effort
        assert first_rung(ladder, 0.9) < len(ladder) - 1 or not any(shares[:-1]) or cores == 1
        assert not ladder[first_rung(ladder, 0.9)].throttle.idle
        assert len({describe(rung.throttle) for rung in ladder}) == len(ladder)


def test_a_share_is_what_a_rung_leaves_of_the_present_speed() -> None:
    def shares(window: NodeWindow, cores: int, used: float | None = None, *, best_effort: bool = True) -> list[float]:
        attempt = replace(CPU, cores=cores, memory_bandwidth_bytes_per_second=used, best_effort=best_effort)
        return [rung.share for rung in rungs(attempt, window)]

    assert shares(NODE, 1) == [0.5, 0.0], "idle CPU time alone leaves half at most"
    assert shares(NODE, 3) == [1 / 3, 1 / 3, 0.0]
    assert shares(NODE, 20) == [0.5, 0.25, 0.1, 0.1, 0.0]
    assert shares(NODE, 2, best_effort=False) == [0.5, 0.0]
    assert shares(ENFORCED, 1) == [0.5, 0.2, 0.1, 0.1, 0.0]
    assert shares(ENFORCED, 1, used=20.0) == [0.5, 0.5, 0.0], "10 % of the peak are half of its use; 20 % are all of it"
    assert shares(ENFORCED, 2, used=40.0) == [0.5, 0.25, 0.25, 0.25, 0.0]
    assert shares(ENFORCED, 1, used=5.0) == [1.0, 0.5, 0.0], "the last one is there although the job uses less"
    assert shares(ENFORCED, 1, used=0.0) == [0.1, 0.1, 0.0]


def test_shares_of_the_bandwidth_that_a_job_does_not_reach_are_left_out() -> None:
    used = replace(CPU, memory_bandwidth_bytes_per_second=30.0)
    assert [rung.throttle.bandwidth_percent for rung in rungs(used, ENFORCED)][:2] == [20, 10]
    throttled = replace(used, throttle=Throttle(bandwidth_percent=20))
    assert [rung.throttle.bandwidth_percent for rung in rungs(throttled, ENFORCED)][:3] == [50, 20, 10]


def test_cores_are_counted_for_each_task() -> None:
    assert cores_each(replace(CPU, cores=12, tasks=3)) == 4
    assert [rung.throttle.cores for rung in rungs(replace(CPU, cores=12, tasks=3), NODE)] == [2, 1, 0]
    assert cores_each(replace(CPU, cores=0, cores_used=3.6)) == 4
