"""Invalid offers of policies, and nodes that change or go during a plan."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.unit.services.mesh import Mesh, running, spec, until

from cotenant import plugins
from cotenant.codec import errors
from cotenant.core.capacity.ledger import Ledger, Offer, Share
from cotenant.core.model.gang import Gang
from cotenant.core.model.refusal import Refusal
from cotenant.core.placement.scored_policy import ScoredPolicy
from cotenant.core.placement.scores import Candidates, Scores
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.policies.consolidate import Consolidate
from cotenant.services.placement.api.server import PLACEMENTS
from cotenant.services.placement.cluster.request_decoding import check_order, remove_candidate
from cotenant.services.placement.planning import planner
from cotenant.v1 import job_pb2
from cotenant.v1 import node_service_pb2 as node_pb2


class Broken(Consolidate):
    """A policy that gives one job the test's answer, and valid ones to the others."""

    name = "broken"

    def __init__(self) -> None:
        self.answer: Callable[[Gang, Ledger], Offer] | None = None

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        if self.answer and gang.gpu_milli == 2000:
            return self.answer(gang, ledger)
        return super().place(gang, ledger, rng)


@pytest.fixture
def placing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that makes meshes place by a policy."""

    def by(policy: Any) -> None:
        load = plugins.load

        def loaded(group: str, name: str, options: Mapping[str, str]) -> Any:
            return policy if group == PLACEMENTS else load(group, name, options)

        monkeypatch.setattr(plugins, "load", loaded)

    return by


@pytest.fixture
def policy(placing: Callable[[Any], None]) -> Broken:
    policy = Broken()
    placing(policy)
    return policy


def stale(gang: Gang, ledger: Ledger) -> Offer:
    return (Share(7, 0, 1),)  # of a node that is not there any more


def overlapping(gang: Gang, ledger: Ledger) -> Offer:
    return (Share(0, 0, 1), Share(0, 0, 1))


def taken(gang: Gang, ledger: Ledger) -> Offer:
    ledger.take(0, gang.parts[0].demand, 4)  # speculates, and forgets to give back
    return (Share(0, 0, 1),)


def raising(gang: Gang, ledger: Ledger) -> Offer:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("answer", [stale, overlapping, taken, raising])
async def test_an_invalid_offer_is_logged_and_the_cycle_continues(
    policy: Broken, answer: Callable[[Gang, Ledger], Offer], capsys: pytest.CaptureFixture[str]
) -> None:
    policy.answer = answer
    async with running() as mesh:
        await mesh.agent("n1", gpus=8, cores=8)
        bad, good = await mesh.submit(gpus=2, cores=1), await mesh.submit(gpus=1, cores=1)
        await mesh.reach(good, "RUNNING")
        refusal = (await mesh.refused(bad, "POLICY_FAILED")).refusal
        assert "the placement policy broken failed on it" in refusal.detail
        assert (await mesh.node("n1")).used_gpu_milli == 1000
        policy.answer = None
        last = await mesh.submit(gpus=1, cores=1)
        await mesh.reach(last, "RUNNING")
        await mesh.reach(bad, "RUNNING")
        assert "policy_failed" in capsys.readouterr().out


class Unhappy(ScoredPolicy):
    """Three scorers with faults, then one that prefers nodes with a larger number."""

    name = "unhappy"

    def __init__(self) -> None:
        scorers = (no_number, too_few, dividing)
        super().__init__({**dict.fromkeys(scorers, 1), lambda candidates: -np.arange(len(candidates.ledger)): 1})


def no_number(candidates: Candidates) -> Scores:
    return np.full(len(candidates.ledger), np.nan)


def too_few(candidates: Candidates) -> Scores:
    return np.zeros(len(candidates.ledger) - 1)


def dividing(candidates: Candidates) -> Scores:
    raise ZeroDivisionError("a bug")


async def test_scorers_with_faults_are_named_and_counted_and_no_job_fails(
    placing: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(planner, "SCORER_FAULTS", mock.Mock(add=lambda scorer: counted.update([scorer])))
    placing(Unhappy())
    async with running() as mesh:
        await mesh.agent("n1", gpus=2, cores=4)
        await mesh.agent("n2", gpus=2, cores=4)
        with capture_logs() as logs:
            jobs = [await mesh.reach(await mesh.submit(gpus=1, cores=1), "RUNNING") for _ in range(2)]
        numbers = {node.number: name for name, node in mesh.parts["placement"].service.cluster.nodes.items()}
    assert {job.attempt.allocations[0].node_id for job in jobs} == {numbers[1]}, "the healthy scorer decides"
    told = [line for line in logs if line["event"] == "scorer_left_out"]
    faults = {line["scorer"]: line["error"] for line in told if line["policy"] == "unhappy"}
    assert sorted(faults) == ["dividing", "no_number", "too_few"]
    assert faults["dividing"] == "ZeroDivisionError: a bug"
    assert counted == Counter(line["scorer"] for line in told)


async def test_a_node_that_disconnects_during_a_cycle_gets_its_work_on_reconnect() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1")
        store = mesh.parts["placement"].store
        store.held_back = asyncio.Event()
        job_id = await mesh.submit()
        await until(lambda: bool(mesh.parts["placement"].service.cluster.attempts))
        await agent.stop()
        store.held_back.set()
        await mesh.reach(job_id, "STARTING")
        assert not agent.assignments
        agent.start()
        await mesh.reach(job_id, "RUNNING")


async def test_a_missing_gpu_is_not_allocated_and_its_job_runs_on() -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1", gpus=2, cores=8)
        job = await mesh.reach(await mesh.submit(), "RUNNING")
        (share,) = job.attempt.allocations[0].tasks[0].gpus
        (index,) = [n for n, gpu in enumerate(agent.inventory.gpus) if gpu.uuid == share.uuid]
        del agent.inventory.gpus[index]
        await told(mesh, agent.inventory.gpus[0].uuid)
        other, third = await mesh.submit(cores=1), await mesh.submit(cores=1)
        given = (await mesh.reach(other, "RUNNING")).attempt.allocations[0].tasks[0].gpus
        assert [one.uuid for one in given] == [agent.inventory.gpus[0].uuid]
        await mesh.refused(third, "CAPACITY")
        assert (await mesh.job(job.id)).phase == job_pb2.JOB_PHASE_RUNNING
        agent.finish((job.id, 1))
        await mesh.reach(job.id, "SUCCEEDED")
        await mesh.refused(third, "CAPACITY")


async def told(mesh: Mesh, uuid: str) -> None:
    """Report a reduced inventory, and wait until placement has applied it."""
    agent = mesh.agents["n1"]
    agent.change_inventory()

    def believed() -> bool:
        node = mesh.parts["placement"].service.cluster.nodes["n1"]
        return [gpu.uuid for gpu in node.inventory.gpus] == [uuid]

    await until(believed)
    node: node_pb2.Node = await mesh.node("n1")
    assert len(node.inventory.gpus) == 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
async def test_unusual_requests_are_answered() -> None:
    """A duplicate job, a victim before the first candidate, a run that never ends, and one that has ended."""
    async with running() as mesh:
        await mesh.agent("n1")
        job_id = await mesh.submit(gpus=1)
        await mesh.reach(job_id, "RUNNING")
        waits = placement_pb2.Candidate(job_id="a", number=1, spec=spec(gpus=4))
        never = placement_pb2.RunLeft(job_id=job_id, number=1)
        for time in (never.median, never.p10, never.p90):
            time.seconds = 2**63 - 1
        over = placement_pb2.RunLeft(job_id=job_id, number=1)
        over.median.seconds, over.p90.seconds = -5, -(2**31)
        for run in (never, over):
            await mesh.plans.ForecastStarts(
                placement_pb2.ForecastStartsRequest(candidates=[waits, waits], runs=[run], draws=3)
            )
        await mesh.plans.PlanPlacement(
            placement_pb2.PlanPlacementRequest(
                candidates=[waits],
                victims=[placement_pb2.Victim(job_id=job_id, number=1, ahead=-7)],
                validate_only=True,
            )
        )


async def test_invalid_amounts_are_refused_and_nothing_is_held() -> None:
    """Negative amounts would free what others hold."""
    async with running() as mesh:
        await mesh.agent("n1", gpus=2)
        less = placement_pb2.Candidate(job_id="less", number=1, spec=spec(gpus=0, cores=1, replicas=8))
        less.spec.roles[0].resources.memory_bytes = -(2**31)
        much = placement_pb2.Candidate(job_id="much", number=1, spec=spec(gpus=1, replicas=2**31 - 1))
        nobody = placement_pb2.Candidate(job_id="nobody", number=1)
        asked = [placement_pb2.Candidate(job_id="good", number=1, spec=spec(gpus=1)), less, much, nobody]
        for call, request in (
            (mesh.plans.PlanPlacement, placement_pb2.PlanPlacementRequest(candidates=asked)),
            (mesh.plans.ForecastStarts, placement_pb2.ForecastStartsRequest(candidates=asked)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request)
            problem = errors.from_error(refused.value)
            assert (problem.code, [one.field for one in problem.violations]) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                [
                    "candidates[1].spec.roles[0].resources.memory_bytes",
                    "candidates[2].spec.roles[0].replicas",
                    "candidates[3].spec.roles",
                ],
            )
        assert not mesh.parts["placement"].service.cluster.attempts


def test_a_plan_that_would_end_before_its_candidate_is_rejected() -> None:
    candidates = [placement_pb2.Candidate(job_id=job_id) for job_id in "abc"]
    candidates[0].next_of_class = 2
    check_order(candidates)
    candidates[1].next_of_class = 1
    with pytest.raises(errors.Problem, match=r"candidates\[1\]\.next_of_class"):
        check_order(candidates)


def test_a_plan_ends_before_the_same_candidate_when_others_are_removed() -> None:
    request = placement_pb2.PlanPlacementRequest(
        candidates=[placement_pb2.Candidate(job_id=job_id) for job_id in "abcd"]
    )
    request.candidates[0].next_of_class, request.candidates[2].next_of_class = 2, 3
    remove_candidate(request, request.candidates[1])
    assert [(one.job_id, one.next_of_class) for one in request.candidates] == [("a", 1), ("c", 2), ("d", 0)]
