"""The order of events at an instant, jobs that never fit, kinds of wait, and failing policies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cotenant import plugins
from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Request, Role
from cotenant.core.model.job_table import Jobs
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.options import BadOption
from cotenant.core.policy.protocols import Order
from cotenant.policies.history import History
from cotenant.simulator import PolicyFailed, Result, Trace, TraceJob, simulate
from cotenant.simulator.engine import Simulation
from cotenant.simulator.traces import workers


def trace(*jobs: tuple[float, float, int]) -> Trace:
    """Return a trace of (submitted, seconds, GPUs); jobs are called a, b, c…"""
    made = (TraceJob(chr(ord("a") + n), at, seconds, workers(gpus)) for n, (at, seconds, gpus) in enumerate(jobs))
    return Trace("made up", "none", tuple(made))


def finishes(result: Result) -> dict[str, float | None]:
    return {one.id: one.finished_seconds for one in result.outcomes}


BACKFILL = {"queue": {"mode": "backfill"}}


def test_resources_freed_at_an_instant_serve_arrivals_at_that_instant() -> None:
    result = simulate(trace((0, 10, 2), (10, 5, 2)), "1x2")
    assert finishes(result) == {"a": 10.0, "b": 15.0}
    assert result.avg_queue_seconds == 0


def test_jct_counts_from_the_submission_and_makespan_from_the_first_one() -> None:
    result = simulate(trace((0, 10, 2), (4, 5, 2)), "1x2")
    assert finishes(result) == {"a": 10.0, "b": 15.0}
    assert (result.avg_jct_seconds, result.makespan_seconds, result.avg_queue_seconds) == (10.5, 15.0, 3.0)
    assert result.gpu_utilisation == pytest.approx(1.0)


def test_an_outcome_has_the_servers_of_the_last_run() -> None:
    result = simulate(trace((0, 10, 4), (0, 10, 1), (10, 5, 2), (10, 5, 8)), "2x2", options=BACKFILL)
    assert {one.id: one.servers for one in result.outcomes} == {"a": 2, "b": 1, "c": 1}


def test_percentiles_interpolate_linearly() -> None:
    result = simulate(trace((0, 10, 1), (0, 20, 1)), "1x2")
    assert (result.median_jct_seconds, result.p95_jct_seconds, result.p99_jct_seconds) == pytest.approx(
        (15, 19.5, 19.9)
    )


def test_a_job_larger_than_the_cluster_is_unschedulable_and_holds_no_job_back() -> None:
    result = simulate(trace((0, 10, 3), (0, 10, 2), (1, 10, 64)), "1x2")
    assert finishes(result) == {"b": 10.0}
    assert (result.jobs, result.finished) == (3, 1)
    assert [job_id for job_id, _ in result.unschedulable] == ["a", "c"]
    assert all(refusal.code is Code.NEVER_FITS for _, refusal in result.unschedulable)
    assert "has room for 2" in result.unschedulable[0][1].detail


class OneNode:
    """Places all of a gang on the first node."""

    name, api_version = "one-node", 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        replicas = gang.parts[0].replicas
        if ledger.room(gang.parts[0].demand)[0] >= replicas:
            return (Share(0, 0, replicas),)
        return Refusal(Code.FRAGMENTED, "not on the first node", "something leaves it")


def test_a_job_the_placement_policy_never_places_holds_no_job_back() -> None:
    result = simulate(trace((0, 10, 3), (0, 10, 2)), "2x2", placement=OneNode())
    assert finishes(result) == {"b": 10.0}
    assert "refused even on the empty cluster: not on the first node" in result.unschedulable[0][1].detail


class Moody(OneNode):
    """Refuses everything after some calls."""

    name = "moody"
    patience = 2

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        self.patience -= 1
        return super().place(gang, ledger, rng) if self.patience >= 0 else Refusal(Code.FRAGMENTED, "no mood")


def test_a_job_left_waiting_forever_is_reported() -> None:
    result = simulate(trace((0, 10, 2), (1, 10, 2)), "1x2", placement=Moody())
    assert finishes(result) == {"a": 10.0, "b": None}
    assert [(job_id, refusal.detail) for job_id, refusal in result.unschedulable] == [
        ("b", "was still waiting when no job was running or still to come: the policies found no place for it")
    ]


def test_a_job_without_gpus_counts_among_the_cpu_jobs() -> None:
    role = Role("worker", 1, Request(cores=2))
    jobs = tuple(TraceJob(name, 0.0, 10.0, (role,)) for name in "ab")
    result = simulate(Trace("made up", "none", jobs), "1x1x2")
    assert result.cpu_jobs_avg_queue_seconds == 5.0
    assert (result.gpu_utilisation, result.cpu_utilisation) == (0.0, 1.0)


def test_a_wait_is_for_capacity_until_enough_is_free_and_then_for_fragmentation() -> None:
    # d wants 2 GPUs on one server: none free until 10, one on each server from 12 to 20, two together from 20.
    jobs = trace((0, 10, 1), (0, 20, 1), (0, 12, 1), (0, 30, 1), (1, 5, 2))
    for mode in ("strict", "backfill"):
        result = simulate(jobs, "2x2", placement="consolidate", options={"queue": {"mode": mode}})
        assert finishes(result)["e"] == 25.0
        assert result.outcomes[4].waits_seconds == (0.0, 8.0, 11.0, 0)
        assert result.waits == {"fair_share": 0, "fragmentation": 0, "capacity": 1, "dependency": 0}
        assert result.waits_seconds == {"fair_share": 0.0, "fragmentation": 8.0, "capacity": 11.0, "dependency": 0}


def test_jobs_behind_the_head_of_a_strict_queue_wait_for_capacity() -> None:
    jobs = trace((0, 10, 1), (0, 20, 1), (0, 12, 1), (0, 30, 1), (1, 5, 2), (1, 5, 1))
    strict = simulate(jobs, "2x2", placement="consolidate")
    assert strict.outcomes[5].waits_seconds == (0.0, 0.0, 19.0, 0)
    assert strict.waits == {"fair_share": 0, "fragmentation": 0, "capacity": 2, "dependency": 0}
    backfill = simulate(jobs, "2x2", placement="consolidate", options=BACKFILL)
    assert backfill.outcomes[5].waits_seconds == (0.0, 0.0, 9.0, 0)


def test_a_gang_that_was_fragmented_waits_for_capacity_once_others_took_what_was_free() -> None:
    # c wants 2 GPUs on one server: one is free on each from 10 to 15, one in all until 40, two together from 41.
    jobs = trace((0, 10, 1), (0, 41, 1), (0, 10, 1), (0, 40, 1), (1, 5, 2), (15, 30, 1))
    result = simulate(jobs, "2x2", placement="consolidate", options=BACKFILL)
    assert result.outcomes[4].waits_seconds == (0.0, 5.0, 34.0, 0)


def test_a_job_that_is_outranked_waits_for_capacity_whatever_it_waited_for_before() -> None:
    # e, the longest, finds one GPU on each server from 10 on; from 15 on two shorter jobs have them.
    jobs = trace((0, 40, 1), (0, 10, 1), (0.5, 40, 1), (0.5, 9.5, 1), (1, 90, 2), (15, 20, 1), (15, 20, 1))
    result = simulate(jobs, "2x2", queue=Shortest(), placement="consolidate")
    assert result.outcomes[4].waits_seconds == (0.0, 10.0, 29.0, 0)
    assert result.outcomes[4].finished_seconds == 130.0


class Picky:
    """Places gangs of three on the first node; others go to the first node with room."""

    name, api_version = "picky", 1

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        replicas = gang.parts[0].replicas
        room = ledger.room(gang.parts[0].demand)
        for node in range(1 if replicas == 3 else len(room)):
            if room[node] >= replicas:
                return (Share(node, 0, replicas),)
        return Refusal(Code.FRAGMENTED, "not there", "something leaves it")


def test_no_job_is_stopped_for_a_job_later_in_the_order() -> None:
    # At 1 s the order is a, c, b, d: c would get b's room, but needs the first node, where a stays; d comes after b.
    jobs = trace((0, 10, 4), (0, 30, 4), (1, 20, 3), (1, 50, 1))
    result = simulate(jobs, "2x4", queue=Shortest(), placement=Picky())
    assert result.preemptions == 0
    assert finishes(result) == {"a": 10.0, "b": 30.0, "c": 30.0, "d": 60.0}


def test_a_trace_without_cores_requests_none() -> None:
    assert simulate("sample", "2x8").cpu_utilisation == 0.0


def test_the_same_arguments_give_the_same_json() -> None:
    def told(**arguments: Any) -> str:
        result = simulate("sample", "2x8", queue="las", predictor="noisy-oracle", **arguments).as_json()
        del result["wall_seconds"]
        return json.dumps(result)

    assert told(seed=3) == told(seed=3)


def test_the_json_has_all_documented_figures() -> None:
    told = simulate("sample", "1x8").as_json()
    promised = """jobs finished avg_jct_seconds median_jct_seconds p95_jct_seconds p99_jct_seconds makespan_seconds
        avg_queue_seconds preemptions gpu_utilisation cpu_utilisation cpu_jobs_avg_queue_seconds qos_guarantee_percent
        waits events wall_seconds seed policies unschedulable"""
    assert set(promised.split()) <= set(told)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["policies"] == {
        "queue": "fifo",
        "placement": "consolidate",
        "allocator": "requested",
        "predictor": "oracle",
        "contention": "none",
    }
    assert [one["code"] for one in told["unschedulable"]] == ["NEVER_FITS", "NEVER_FITS"]


def test_where_nothing_finishes_there_are_no_figures() -> None:
    result = simulate(trace((0, 10, 3)), "1x2")
    assert (result.finished, result.avg_jct_seconds, result.makespan_seconds, result.gpu_utilisation) == (
        0,
        None,
        None,
        None,
    )
    json.dumps(result.as_json(), allow_nan=False)


def test_a_stopped_simulation_reports_the_figures_so_far() -> None:
    seen: list[float] = []

    def watch(simulation: Simulation) -> bool:
        seen.append(simulation.now)
        return any(sim_job.finished_seconds == simulation.now for sim_job in simulation.sim_jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotenant.simulator.run.WATCH_SECONDS", 0.0)
        result = simulate("sample", "2x8", watch=watch)
    assert not result.complete
    assert result.simulated_seconds == seen[-1] > (result.makespan_seconds or 0)
    assert 0 < result.finished < result.jobs < 260
    held = sum(one.run_seconds * one.gpu_milli / 1000 for one in result.outcomes)
    assert result.gpu_utilisation == pytest.approx(held / (16 * seen[-1]))
    assert not result.unschedulable
    running = [one for one in result.outcomes if one.finished_seconds is None]
    assert all(
        one.run_seconds + one.queue_seconds == pytest.approx(seen[-1] - one.submitted_seconds) for one in running
    )


class Shortest:
    """Runs the job with the least remaining time; jobs without a prediction come last."""

    name, api_version, preemptive, strict, running_first = "shortest", 1, True, False, False

    def order(self, jobs: Jobs, now: float) -> Order:
        return Order(np.zeros(len(jobs), dtype=np.int64), np.nan_to_num(jobs.remaining_seconds, nan=1e12))


def test_the_oracle_gives_the_true_remaining_time() -> None:
    # At 4 s job a has 6 s left, less than b; at 6 s it has 4 s left, more than c.
    jobs = trace((0, 10, 1), (4, 7, 1), (6, 3, 1))
    assert finishes(simulate(jobs, "1x1", queue=Shortest())) == {"a": 13.0, "b": 20.0, "c": 9.0}
    assert finishes(simulate(jobs, "1x1", queue=Shortest(), predictor="none")) == {"a": 10.0, "b": 17.0, "c": 20.0}


def test_work_to_be_repeated_is_part_of_the_true_rest() -> None:
    # Stopped at 6 s with 4 s left, a needs 5 s more, which is longer than d.
    jobs = trace((0, 10, 1), (6, 3, 1), (8, 4.5, 1))
    cost = {"simulator": {"preemption_cost_seconds": "1"}}
    assert finishes(simulate(jobs, "1x1", queue=Shortest(), options=cost)) == {"a": 18.5, "b": 9.0, "c": 13.5}
    assert finishes(simulate(jobs, "1x1", queue=Shortest())) == {"a": 13.0, "b": 9.0, "c": 17.5}


@pytest.mark.deep
def test_a_noisy_oracle_without_noise_is_an_oracle() -> None:
    told = {"predictor": {"predictable": "1", "spread": "0"}}
    exact = simulate("sample", "2x8", queue=Shortest())
    assert finishes(simulate("sample", "2x8", queue=Shortest(), predictor="noisy-oracle", options=told)) == finishes(
        exact
    )
    noise = {"predictor": {"predictable": "1", "spread": "0.5"}}
    noisy = simulate("sample", "2x8", queue=Shortest(), predictor="noisy-oracle", options=noise)
    assert finishes(noisy) != finishes(exact)


def test_a_predictor_that_learns_can_be_simulated() -> None:
    result = simulate("sample", "2x8", queue=Shortest(), predictor="history")
    assert result.finished == 260


def test_a_predictor_object_works_like_its_name() -> None:
    made = simulate("sample", "2x8", queue=Shortest(), predictor=History())
    assert made.policies["predictor"] == "history"
    assert finishes(made) == finishes(simulate("sample", "2x8", queue=Shortest(), predictor="history"))
    with pytest.raises(BadOption, match="was given for a predictor object"):
        simulate("sample", "2x8", predictor=History(), options={"predictor": {"kinds_max": "3"}})


class Failing(Shortest):
    name = "failing"

    def __init__(self, order: Order | Exception) -> None:
        self._order = order

    def order(self, jobs: Jobs, now: float) -> Order:
        if isinstance(self._order, Exception):
            raise self._order
        return self._order


NO_LEVEL = np.zeros(1, dtype=np.int64)


@pytest.mark.parametrize(
    ("order", "fault"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (Order(np.zeros(2, dtype=np.int64), np.zeros(2)), "2 levels and 2 scores for 1 jobs"),
        (Order(NO_LEVEL, np.array([np.nan])), "a score is NaN"),
        (Order(NO_LEVEL, np.zeros(1), given_up=np.zeros(2, dtype=np.bool_)), "2 marks for 1 jobs"),
        (Order(NO_LEVEL, np.zeros(1), over_share=np.zeros(0, dtype=np.bool_)), "0 marks for 1 jobs"),
        (Order(NO_LEVEL, np.zeros(1), valid_seconds=-1.0), "valid for -1.0 s"),
        (Order(NO_LEVEL, np.zeros(1), valid_seconds=float("nan")), "valid for nan s"),
    ],
)
def test_a_queue_policy_that_fails_is_named(order: Order | Exception, fault: str) -> None:
    with pytest.raises(PolicyFailed, match="queue policy 'failing' failed over 1 jobs") as failure:
        simulate(trace((0, 10, 1)), "1x1", queue=Failing(order))
    assert fault in str(failure.value)


class BadPlacement(OneNode):
    name = "bad"

    def __init__(self, offer: Offer | Exception) -> None:
        self._offer = offer

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        if isinstance(self._offer, Exception):
            raise self._offer
        return self._offer


@pytest.mark.parametrize(
    ("offer", "fault"),
    [
        (KeyError("node"), "KeyError: 'node'"),
        ((Share(9, 0, 2),), "it offered a node or part that does not exist: Share(node=9"),
        ((Share(0, 9, 2),), "it offered a node or part that does not exist: Share(node=0, part=9"),
        ((Share(0, 0, 1),), "it made an invalid offer"),
        ((Share(0, 0, 1), Share(0, 0, 1)), "it made an invalid offer"),
    ],
)
def test_a_placement_policy_that_fails_is_named(offer: Offer | Exception, fault: str) -> None:
    with pytest.raises(PolicyFailed, match="placement policy 'bad' failed") as failure:
        simulate(trace((0, 10, 2)), "2x1", placement=BadPlacement(offer))
    assert fault in str(failure.value)


class Restless(Shortest):
    """Returns an order that expires at once."""

    name = "restless"

    def order(self, jobs: Jobs, now: float) -> Order:
        return Order(np.zeros(len(jobs), dtype=np.int64), jobs.arrival_seconds, valid_seconds=0.0)


def test_an_order_that_never_lasts_cannot_stop_the_clock() -> None:
    result = simulate(trace((0, 0.5, 1), (0, 0.5, 1)), "1x1", queue=Restless())
    assert finishes(result) == {"a": 0.5, "b": 1.0}
    assert 400 <= result.events <= 600


@pytest.mark.deep
def test_several_predictors_are_chained_each_with_its_options() -> None:
    told = {"predictor": {"rates_max": "4", "history.samples_max": "8"}}
    both = simulate("sample", "2x8", queue=Shortest(), predictor="loss-curve,history", options=told)
    alone = {"predictor": {"samples_max": "8"}}
    assert finishes(both) == finishes(simulate("sample", "2x8", queue=Shortest(), predictor="history", options=alone))


@pytest.mark.parametrize(
    ("predictor", "option", "complaint"),
    [
        ("history,oracle", {}, "predictor.oracle: cannot be combined"),
        (
            "history,latency",
            {"hist.samples_max": "1"},
            "predictor.hist.samples_max: is for 'hist'.*did you mean history",
        ),
        ("history,latncy", {}, "there is no predictor 'latncy'; did you mean latency"),
    ],
)
def test_a_list_of_predictors_that_makes_no_sense_is_refused(
    predictor: str, option: dict[str, str], complaint: str
) -> None:
    with pytest.raises((plugins.UnknownPolicy, BadOption), match=complaint):
        simulate("sample", "2x8", predictor=predictor, options={"predictor": option})
