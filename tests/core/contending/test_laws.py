"""Laws of the eliminator in a closed loop: whatever CPU jobs come, victims are relieved and nobody is ruined."""

from __future__ import annotations

from benchmarks.contention_node import PEAK, CpuJob, ModelNode, Trainer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cotenant.core.policy import FREE
from cotenant.policies.coda_eliminator import CodaEliminator

UNSEEN = 0.12  # a smaller slowdown may hide in 5 % of noise for minutes
RELIEVED = 0.25  # of what a job would lose unhelped, so much it may
SEARCH = (Phase.explicit, Phase.reuse, Phase.generate)  # to shrink a story of half an hour takes minutes
LEARNT, MINUTES_20, HALF_HOUR = 60, 240, 360


@st.composite
def crowds(draw: st.DrawFn) -> list[CpuJob]:
    """One job that may hurt a lot, and others that hurt little: two large ones can hide each other."""
    jobs = []
    for number in range(draw(st.integers(1, 4))):
        begin = 5.0 * LEARNT + draw(st.floats(0, 300))
        jobs.append(
            CpuJob(
                f"cpu-{number}",
                demand=draw(st.floats(0, 2 if not number else 0.2)) * PEAK,
                cores=draw(st.integers(1, 32)),
                begin=begin,
                end=begin + draw(st.floats(30, 4000)),
                best_effort=draw(st.booleans()),
            )
        )
    return jobs


@settings(max_examples=25, deadline=None, phases=SEARCH)
@given(crowds(), st.integers(0, 100), st.booleans(), st.booleans())
def test_victims_are_relieved_and_cpu_jobs_get_on(jobs: list[CpuJob], seed: int, told: bool, enforced: bool) -> None:
    trainers = [Trainer(), Trainer("other", 30.0)]
    node, policy = ModelNode(trainers, jobs, seed, told=told or enforced, enforced=enforced), CodaEliminator()
    assert not any(directives for _, directives in node.run(policy, LEARNT))
    lost, bearable = 0.0, 0.0
    stood: dict[str, list[float]] = {job.id: [] for job in jobs}
    for _ in range(HALF_HOUR):
        window = node.window()
        wants = sum(job.demand for job in jobs if job.runs(node.now)) + sum(one.demand for one in trainers)
        slowdown = 1 - 1 / (1 / 3 + 2 / 3 * max(1.0, wants / PEAK))
        bearable += slowdown if slowdown < UNSEEN else RELIEVED * slowdown
        lost += 1 - trainers[0].speed
        for job in jobs:
            if not job.runs(node.now):
                continue
            if job.throttle.suspended:
                stood[job.id].append(node.now)
            else:
                assert job.throttle.bandwidth_percent >= 10
                assert not job.throttle.cores or 10 * job.throttle.cores >= job.cores
                assert job.best_effort or not job.throttle.idle
        node.carry_out(policy.judge(window))
    assert lost <= bearable + 8, "most of what would be lost is not"
    assert all(5 * len(times) <= 300 for times in stood.values()), "nobody stands still for more than 5 min of 30"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_all_is_given_back_once_nobody_is_hurt_any_more(seed: int, enforced: bool) -> None:
    trainer, hog = Trainer(), CpuJob("hog", demand=1.6 * PEAK, cores=8, begin=5.0 * LEARNT)
    node, policy = ModelNode([trainer], [hog], seed, enforced=enforced), CodaEliminator()
    node.run(policy, LEARNT + 12)
    assert hog.throttle != FREE
    hog.demand = 1e9
    node.run(policy, MINUTES_20)
    assert hog.throttle == FREE
