"""Laws of the eliminator in a closed loop: for any CPU jobs, victims are relieved and no job is ruined."""

from __future__ import annotations

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.contention_node import PEAK, CpuJob, ModelNode, Trainer
from cotenant.core.policy.protocols import FREE
from cotenant.policies.coda_eliminator.policy import CodaEliminator

UNSEEN = 0.12  # a smaller slowdown may hide in 5 % of noise for minutes
RELIEVED = 0.25  # allowed share of the loss without relief
SEARCH = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a run of half an hour takes minutes
STEP_SECONDS = 60.0  # jobs that start within it are one step
LEARNT, MINUTES_20, HALF_HOUR = 60, 240, 360


@st.composite
def crowds(draw: st.DrawFn) -> list[CpuJob]:
    """One job with a large effect, and others with small ones: two large ones can hide each other."""
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


def slowdown(demand: float) -> float:
    """Return the share of its speed that a trainer loses if all jobs together use this much bandwidth."""
    return 1 - 1 / (1 / 3 + 2 / 3 * max(1.0, demand / PEAK))


def bearable_of(jobs: list[CpuJob], now: float, others: float) -> float:
    """Return the share of its speed that a trainer may lose to the present CPU jobs without relief.

    The loss at one step, from jobs that start within a minute, may be hidden by noise. It stays hidden: the baseline
    follows, and the next step is measured from there. So two small steps may hide what one would not.
    """
    demand, worst, steps = others, 0.0, dict[float, float]()
    for job in jobs:
        if job.runs(now):
            minute = next((begin for begin in steps if abs(begin - job.begin) <= STEP_SECONDS), job.begin)
            steps[minute] = steps.get(minute, 0.0) + job.demand
    for begin in sorted(steps):
        before, demand = 1 - slowdown(demand), demand + steps[begin]
        worst = max(worst, 1 - (1 - slowdown(demand)) / before)
    return slowdown(demand) if worst < UNSEEN else RELIEVED * slowdown(demand)


def two_small_steps() -> list[CpuJob]:
    """Return jobs that cost a trainer 8% of its speed, and three minutes later 7% of what is left."""
    return [
        CpuJob("cpu-0", demand=82.3e9, cores=32, begin=402.1, end=2739.0),
        CpuJob("cpu-2", demand=10.7e9, cores=8, begin=301.0, end=1972.7),
        CpuJob("cpu-3", demand=12.2e9, cores=15, begin=582.0, end=2332.4, best_effort=True),
    ]


@settings(max_examples=examples(25), deadline=None, phases=SEARCH)
@example(jobs=two_small_steps(), seed=80, reported=False, enforced=False)
@given(crowds(), st.integers(0, 100), st.booleans(), st.booleans())
def test_victims_are_relieved_and_cpu_jobs_get_on(
    jobs: list[CpuJob], seed: int, reported: bool, enforced: bool
) -> None:
    trainers = [Trainer(), Trainer("other", 30.0)]
    node, policy = ModelNode(trainers, jobs, seed, reported=reported or enforced, enforced=enforced), CodaEliminator()
    assert not any(directives for _, directives in node.run(policy, LEARNT))
    lost, bearable = 0.0, 0.0
    suspensions: dict[str, list[float]] = {job.id: [] for job in jobs}
    for _ in range(HALF_HOUR):
        window = node.window()
        bearable += bearable_of(jobs, node.now, sum(one.demand for one in trainers))
        lost += 1 - trainers[0].speed
        for job in jobs:
            if not job.runs(node.now):
                continue
            if job.throttle.suspended:
                suspensions[job.id].append(node.now)
            else:
                assert job.throttle.bandwidth_percent >= 10
                assert not job.throttle.cores or 10 * job.throttle.cores >= job.cores
                assert job.best_effort or not job.throttle.idle
        node.apply(policy.judge(window))
    assert lost <= bearable + 8, "most of what would be lost is not"
    assert all(5 * len(times) <= 300 for times in suspensions.values()), "nobody stands still for more than 5 min of 30"


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_all_throttles_are_released_once_no_job_is_slowed(seed: int, enforced: bool) -> None:
    trainer, hog = Trainer(), CpuJob("hog", demand=1.6 * PEAK, cores=8, begin=5.0 * LEARNT)
    node, policy = ModelNode([trainer], [hog], seed, enforced=enforced), CodaEliminator()
    node.run(policy, LEARNT + 12)
    assert hog.throttle != FREE
    hog.demand = 1e9
    node.run(policy, MINUTES_20)
    assert hog.throttle == FREE
