"""How many pilots waiting jobs ask for, and what is submitted and cancelled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.pilots.plan import Limits, Pilot, Size, WaitingJob, make_plan, pilots_needed

SHAPE = Size(4000, 8, 1 << 40)
sizes = st.builds(Size, st.sampled_from([0, 500, 1000, 2000, 4000, 8000]), st.integers(1, 9))
jobs = st.lists(st.lists(sizes, min_size=1, max_size=4).map(tuple), max_size=6).map(
    lambda found: [WaitingJob(str(number), replicas) for number, replicas in enumerate(found)]
)
pilots = st.lists(st.sampled_from([(True, False), (False, False), (False, True)])).map(
    lambda states: [Pilot(str(number), *state) for number, state in enumerate(states)]
)


@given(jobs, st.integers(0, 5))
def test_the_pilots_hold_every_job_that_fits(waiting: list[WaitingJob], most: int) -> None:
    needed, too_large = pilots_needed(waiting, SHAPE, most)
    fitting = [replica for job in waiting if job.id not in too_large for replica in job.replicas]
    gpus, cores = sum(size.gpu_milli for size in fitting), sum(size.cores for size in fitting)
    least = max(-(-gpus // SHAPE.gpu_milli), -(-cores // SHAPE.cores))
    assert min(least, most) <= needed <= min(most, len(fitting))


@given(pilots, st.integers(0, 9), st.integers(0, 3), st.integers(0, 6))
def test_a_plan_stays_within_the_limits(known: list[Pilot], needed: int, least: int, more: int) -> None:
    limits = Limits(least, least + more)
    plan = make_plan(known, needed, limits)
    assert not (plan.submit and plan.cancel)
    assert set(plan.cancel) <= {pilot.id for pilot in known if pilot.pending}
    left = len(known) + plan.submit - len(plan.cancel)
    assert left >= least
    if plan.submit:
        assert left <= limits.most
    serving = sum(pilot.serving for pilot in known)
    assert left >= min(limits.most, serving + needed)


def test_pilots_that_start_count_as_room() -> None:
    known = [Pilot("1", pending=False), Pilot("2", pending=True)]
    assert make_plan(known, 2, Limits(0, 4)).submit == 0
