"""Which cores jobs of a Slurm node keep, give away and borrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cotenant.node_agent.slurm.core_sharing import CoreSharing, JobUse, Share

IDLE = JobUse("1", (0, 1, 2, 3, 4, 5), used=1.0, steps=frozenset({"a"}))
TRAIN = JobUse("2", (6, 7), used=2.0, gpus=True, steps=frozenset({"b"}))


def after(sharing: CoreSharing, jobs: Sequence[JobUse], begin: float, seconds: int) -> Mapping[str, Share]:
    """Return the shares after looking once a second."""
    shares: Mapping[str, Share] = {}
    for second in range(seconds):
        shares = sharing.decide(begin + second, jobs)
    return shares


def test_a_job_keeps_what_it_uses_with_headroom_after_a_window() -> None:
    sharing = CoreSharing(10.0)
    assert not after(sharing, [IDLE], 0.0, 10)
    assert after(sharing, [IDLE], 10.0, 2)["1"].cores == (0, 1)


def test_a_job_that_presses_gets_everything_back_and_peace() -> None:
    sharing = CoreSharing(10.0)
    after(sharing, [IDLE], 0.0, 12)
    assert not sharing.decide(12.0, [replace(IDLE, used=1.9)])
    assert not after(sharing, [IDLE], 13.0, 58)
    assert after(sharing, [IDLE], 71.0, 20)["1"].cores == (0, 1)
    assert not sharing.decide(92.0, [replace(IDLE, used=2.0)])
    assert not after(sharing, [IDLE], 93.0, 100)  # twice as long


def test_a_new_step_a_suspension_and_bound_threads_bring_the_cores_back() -> None:
    for changed in (
        replace(IDLE, steps=frozenset({"a", "c"})),
        replace(IDLE, fixed="it is suspended"),
        replace(IDLE, used=None),
    ):
        sharing = CoreSharing(10.0)
        assert after(sharing, [IDLE], 0.0, 12)
        assert not sharing.decide(12.0, [changed])
    assert not after(CoreSharing(10.0), [replace(IDLE, fixed="bound")], 0.0, 100)


def test_told_cores_count_at_once_and_are_not_returned_because_of_use() -> None:
    sharing = CoreSharing(10.0)
    told = replace(IDLE, told=3, used=3.0)
    assert after(sharing, [told], 0.0, 2)["1"].cores == (0, 1, 2)
    assert after(sharing, [told], 2.0, 30)["1"].cores == (0, 1, 2)


def test_a_gpu_job_borrows_one_core_after_the_other_and_the_owner_comes_first() -> None:
    sharing = CoreSharing(10.0)
    assert len(after(sharing, [IDLE, TRAIN], 0.0, 11)["2"].lent) == 1
    assert len(after(sharing, [IDLE, replace(TRAIN, used=3.0)], 11.0, 5)["2"].lent) == 2
    assert len(after(sharing, [IDLE, replace(TRAIN, used=4.0)], 16.0, 5)["2"].lent) == 2  # at most as many as its own
    assert not sharing.decide(21.0, [replace(IDLE, used=2.0), TRAIN])


def test_a_borrower_returns_what_it_does_not_use() -> None:
    sharing = CoreSharing(10.0)
    after(sharing, [IDLE, TRAIN], 0.0, 11)
    assert not after(sharing, [IDLE, replace(TRAIN, used=0.5)], 11.0, 1).get("2", Share(())).lent


def test_idle_cores_are_lent_only_where_told() -> None:
    train = replace(TRAIN, told=4)
    assert not after(CoreSharing(10.0), [train], 0.0, 5)
    sharing = CoreSharing(10.0, lend_idle=True)
    for second in range(3):
        shares = sharing.decide(float(second), [train], range(12))
    assert shares["2"].lent == (0, 1)
    assert "2" not in sharing.decide(3.0, [train, replace(IDLE, used=None)], range(8))


uses = st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8), st.booleans(), st.booleans()), max_size=40)


@given(uses=uses, told=st.none() | st.integers(1, 12))
def test_no_core_belongs_to_two_jobs_and_none_is_left_without(
    uses: list[tuple[float, float, bool, bool]], told: int | None
) -> None:
    sharing = CoreSharing(3.0, lend_idle=True)
    for second, (first, second_used, suspended, new_step) in enumerate(uses):
        jobs = [
            replace(IDLE, used=first, fixed="it is suspended" if suspended else ""),
            replace(TRAIN, used=second_used, told=told, steps=frozenset({"b", f"{second * new_step}"})),
        ]
        shares = sharing.decide(float(second), jobs, range(10))
        held = [shares[job.job].cores if job.job in shares else job.cores for job in jobs]
        assert all(held)
        assert not {*held[0]} & {*held[1]}
