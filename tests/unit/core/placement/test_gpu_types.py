"""Choosing among GPU types: speeds, prices, and the nodes that `locality` takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.estimate import UNKNOWN, Candidate, CandidateEstimate, Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.candidate_allocations import standard_candidates
from cotenant.core.placement.gpu_types import effective_gpus, rates_by_type
from cotenant.core.policy.cluster_view import ClusterView, RunningJob
from cotenant.policies.locality import WaitsForLocality

SLOW, FAST = "Tesla T4", "NVIDIA A100-SXM4-80GB"
SHAPES = [NodeShape(4, 32, SLOW), NodeShape(4, 32, FAST)]


class Running(ClusterView):
    """A view of jobs that run nowhere in particular."""

    now = 0.0

    def __init__(self, *gangs: Gang) -> None:
        self._jobs = {gang.job_id: RunningJob(gang, (), 0.0) for gang in gangs}

    def running_jobs(self) -> dict[str, RunningJob]:
        return self._jobs

    def jobs_on(self, node: int) -> list[RunningJob]:
        return []


def estimate(**rates: float) -> Estimate:
    """Return an estimate with these rates by type, `slow` and `fast`."""
    names = {"slow": SLOW, "fast": FAST}
    own = CandidateEstimate(9.0, allocation=Candidate(4, 1000))
    return Estimate(
        candidates=(
            own,
            *(
                CandidateEstimate(rate, allocation=Candidate(0, 1000, gpu_type=names[name]))
                for name, rate in rates.items()
            ),
        )
    )


def gang(job_id: str = "a", gpus: int = 1, replicas: int = 1, gpu_type: str = "", **rates: float) -> Gang:
    return Gang(
        job_id,
        (Part("worker", replicas, Demand(1000 * gpus, 1, gpu_type)),),
        estimate=estimate(**rates) if rates else UNKNOWN,
    )


def taken_by(ledger: Ledger, node: int, gpus: int) -> None:
    ledger.take(node, Demand(1000), gpus)


def nodes_of(answer: Offer | Refusal) -> list[int]:
    assert not isinstance(answer, Refusal), answer
    return [share.node for share in answer]


def place(one: Gang, ledger: Ledger, *running: Gang, types: bool = True) -> list[int]:
    policy = WaitsForLocality(WaitsForLocality.Options(gpu_types=types))
    policy.begin_cycle(Running(*running))
    return nodes_of(policy.place(one, ledger, np.random.default_rng(0)))


TYPICAL = [gang(str(number), slow=1.0, fast=4.0) for number in range(4)]


def test_while_gpus_are_free_a_job_takes_its_fastest_type() -> None:
    assert place(gang(slow=1, fast=2), Ledger(SHAPES)) == [1]
    assert place(gang(slow=2, fast=1), Ledger(SHAPES[::-1])) == [1]
    assert place(gang(slow=1, fast=2), Ledger(SHAPES), types=False) == [0]


def test_as_a_type_fills_up_jobs_stay_for_which_it_does_more_than_for_others() -> None:
    ledger = Ledger(SHAPES)
    taken_by(ledger, 1, 3)
    assert place(gang("insensitive", slow=1, fast=1.1), ledger, *TYPICAL) == [0]
    assert place(gang("sensitive", slow=1, fast=8), ledger, *TYPICAL) == [1]


def test_a_job_of_which_nothing_is_known_is_taken_to_be_typical() -> None:
    assert place(gang(), Ledger(SHAPES), *TYPICAL) == [1]
    assert place(gang(), Ledger(SHAPES)) == [0], "without a typical job it goes where it fits"


def test_an_unknown_type_is_expected_to_be_as_fast_as_for_typical_jobs() -> None:
    assert place(gang(slow=3), Ledger(SHAPES), *TYPICAL) == [1]


def test_a_named_type_is_a_requirement_and_several_are_a_choice() -> None:
    assert place(gang(gpu_type="T4", slow=1, fast=9), Ledger(SHAPES)) == [0]
    assert place(gang(gpu_type="T4|A100", slow=1, fast=9), Ledger(SHAPES)) == [1]


def test_a_gang_on_several_servers_stays_on_one_type_if_it_has_room() -> None:
    ledger = Ledger([SHAPES[1], SHAPES[0], SHAPES[0], SHAPES[1]])
    several = replace(gang(gpus=1, replicas=8, slow=1, fast=3), fragmented_seconds=1e6)
    assert place(several, ledger) == [0, 3]
    assert place(replace(several, estimate=estimate(slow=3, fast=1)), ledger) == [1, 2]


def test_a_gang_takes_several_types_rather_than_none() -> None:
    ledger = Ledger([SHAPES[0], SHAPES[1]])
    wide = replace(gang(replicas=8, slow=1, fast=3), fragmented_seconds=1e6)
    assert sorted(place(wide, ledger)) == [0, 1]


@pytest.mark.parametrize(("wanted", "types"), [("", {SLOW, FAST}), ("T4|A100", {SLOW, FAST}), ("T4", set())])
def test_candidates_name_the_types_among_which_a_training_may_choose(wanted: str, types: set[str]) -> None:
    spec = JobSpec(roles=(Role("worker", 1, Request(1000, 4, wanted)),))
    own, *others = standard_candidates(spec, SHAPES)
    assert own.gpu_type == wanted
    assert {one.gpu_type for one in others} - {wanted} == types
    assert {one.cores for one in others if one.gpu_type in types} <= {4}
    assert not {one.gpu_type for one in standard_candidates(spec, SHAPES[:1])} - {wanted}


def test_an_open_number_of_cores_stays_open_on_each_type() -> None:
    spec = JobSpec(roles=(Role("worker", 1, Request(1000, None)),))
    assert {one.cores for one in standard_candidates(spec, SHAPES) if one.gpu_type} == {0}


def test_only_allocations_that_differ_in_nothing_but_the_type_are_compared() -> None:
    judged = (
        CandidateEstimate(1.0, allocation=Candidate(1, gpu_type=SLOW)),
        CandidateEstimate(8.0, allocation=Candidate(8, gpu_type=FAST)),
        CandidateEstimate(2.0, allocation=Candidate(1, gpu_type=FAST)),
        CandidateEstimate(None, allocation=Candidate(1, gpu_type="V100")),
        CandidateEstimate(3.0),
    )
    assert rates_by_type(Estimate(candidates=judged)) == {SLOW: 1.0, FAST: 2.0}
    assert rates_by_type(UNKNOWN) == {}


def test_gpus_are_worth_as_many_as_their_speed_says_and_the_average_is_one() -> None:
    known = estimate(slow=1, fast=3)
    shapes = [replace(SHAPES[0], count=3), SHAPES[1]]
    worth = {kind: effective_gpus(known, kind, shapes) for kind in (SLOW, FAST)}
    assert worth[FAST] == 3 * worth[SLOW]
    assert (3 * worth[SLOW] + worth[FAST]) / 4 == pytest.approx(1.0)
    assert effective_gpus(known, "V100", shapes) == effective_gpus(UNKNOWN, FAST, shapes) == 1.0
    assert effective_gpus(known, FAST, SHAPES, "A100") == 1.0, "one that may have no other type has no choice"
