"""The policy lab: what it accepts, what it finds, and how its simulations end; without a mesh."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from tests.unit.web.test_boards import FakeMesh

from cotenant.client.errors import InvalidArgument
from cotenant.rpc.access import Access, AccessError
from cotenant.rpc.endpoints import Endpoints
from cotenant.simulator.comparison import runner
from cotenant.simulator.comparison.runner import ArmFailed
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.snapshots import Held, InUse, Job, Known, Node, Part, Snapshot
from cotenant.v1.job_service_pb2 import ListJobsResponse
from cotenant.v1.node_service_pb2 import ListNodesResponse
from cotenant.v1.policy_service_pb2 import ListPoliciesResponse, Policy
from cotenant.v1.tenant_service_pb2 import ListQueuesResponse, Queue
from cotenant.web import lab_board
from cotenant.web.lab import RUNS_MAX, Choice, Event, Lab, read_choices
from cotenant.web.lab_process import NoSnapshot, scenario_of, simulate, too_many
from cotenant.web.lab_view import IN_USE, POINTS

NOW = 1_800_000_000.0
HOUR = 3600.0


def job(name: str, tenant: str, waited: float, expected: float | None, **more: Any) -> Job:
    """Return a job that needs the only GPU."""
    parts = (Part("worker", 1, 1000, 1),)
    known = None if expected is None else Known(expected, 0.9)
    return Job(name, NOW - waited, parts, tenant=tenant, name=name, known=known, **more)


def snapshot(*jobs: Job, queue: str = "fifo") -> Snapshot:
    policies = {"queue": InUse(queue), "placement": InUse("consolidate"), "allocator": InUse("requested")}
    return Snapshot(NOW, (Node("n1", 1, 8),), jobs, policies=policies)


RUNS = job("runs", "speech", 900.0, 2 * 600.0, running_since_seconds=NOW - 600.0, held=(Held("n1", 1, 1),), cores=(1,))
LONG = job("long", "speech", 500.0, HOUR)
SHORT = job("short", "vision", 400.0, 60.0)


@pytest.fixture(autouse=True)
def _of_one_process() -> None:
    """Forget the trace of another test: a process simulates once."""
    runner._trace.cache_clear()


def test_who_gains_and_who_loses_is_against_the_policies_in_use() -> None:
    told: list[Event] = []
    found = simulate(snapshot(RUNS, LONG, SHORT), [Choice("queue", "sjf"), Choice("placement", "count")], told.append)
    in_use, sjf, count = found["policies"]
    assert [one["label"] for one in found["policies"]] == [IN_USE, "queue sjf", "placement count"]
    assert (in_use["choices"]["queue"], sjf["choices"]["queue"], count["choices"]["queue"]) == ("fifo", "sjf", "fifo")
    assert (sjf["sooner"], sjf["later"], sjf["finished"], sjf["never"]) == (1, 1, 3, 0)
    assert sjf["change_seconds"] == pytest.approx((60.0 - HOUR) / 3)
    assert (count["change_seconds"], count["sooner"]) == (0.0, 0)
    by_tenant = {one["tenant"]: one["changes"] for one in found["tenants"]}
    assert by_tenant == {"vision": [pytest.approx(-HOUR), 0.0], "speech": [pytest.approx(30.0), 0.0]}
    assert [(one["id"], one["changes"][0]) for one in found["jobs"]] == [
        ("short", pytest.approx(-HOUR)), ("long", pytest.approx(60.0)),
    ]  # fmt: skip
    assert found["jobs"][0]["ends_in_seconds"] == pytest.approx(600.0 + HOUR + 60.0)
    assert (found["nodes"], found["running"], found["waiting"]) == (1, 1, 2)
    assert len(found["times"]) == POINTS == len(sjf["series"]["waiting"])
    assert (in_use["series"]["waiting"][0], in_use["series"]["gpus"][0]) == (2.0, 1.0)
    assert [event.name for event in told] == ["progress", "progress"]


def test_jobs_of_unknown_length_are_told_with_what_was_assumed() -> None:
    found = simulate(
        snapshot(RUNS, job("new", "vision", 60.0, None)), [Choice("queue", "las")], lambda _: None, ["omitted: 3"]
    )
    assert found["notes"][0] == "omitted: 3"
    assert found["notes"][1].startswith("the run time of 1 of 2 jobs is unknown")
    assert not [note for note in found["notes"] if "bound" in note]


def test_a_profile_knows_what_the_mesh_knows_and_options_go_with_their_policy() -> None:
    base = Scenario("t", "c", queue="fifo", predictor="recorded", options={"queue": {"mode": "backfill"}})
    full = scenario_of(Choice("profile", "full"), base)
    assert (full.queue, full.predictor, full.contention) == ("borda-mlfq", "recorded", "none")
    assert scenario_of(Choice("queue", "las"), base).options.get("queue", {}) == {}
    assert scenario_of(Choice("placement", "count"), base).options["queue"] == {"mode": "backfill"}
    with pytest.raises(NoSnapshot, match="no profile"):
        scenario_of(Choice("profile", "fulll"), base)


def test_a_policy_that_is_not_installed_is_named() -> None:
    with pytest.raises(ArmFailed, match="las2"):
        simulate(snapshot(RUNS), [Choice("queue", "las2")], lambda _: None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "1 to 4"), (b"[]", "1 to 4"), (b'{"policies": []}', "1 to 4"), (b"[" * 100_000, "1 to 4"),
        (b'{"policies": [["queue", "a"], ["queue", "b"], ["queue", "c"], ["queue", "d"], ["queue", "e"]]}', "1 to 4"),
        (b'{"policies": [["queue", "a"], ["predictor", "b"], ["queue", ""]]}', r"policies\[1\], policies\[2\]: must"),
        (b'{"policies": [["queue", "a"], ["queue", "a"]]}', "'queue a' occurs twice"),
    ],
)  # fmt: skip
def test_invalid_policies_are_named(body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read_choices(body)


# Before a run -------------------------------------------------------------------------------------------------------


def queues(*counts: int) -> Callable[[Any], ListQueuesResponse]:
    """Return the method whose answers have these numbers of jobs, one after the other."""
    left = list(counts)

    def answer(_: Any) -> ListQueuesResponse:
        return ListQueuesResponse(queues=[Queue(id="default", policy="fifo", waiting=left.pop(0) - 1, running=1)])

    return answer


@pytest.mark.parametrize(("counts", "seen", "hidden"), [((7, 7), 3, 4), ((7, 7), 7, 0), ((7, 9), 8, 0), ((9, 7), 8, 0)])
async def test_jobs_that_come_and_go_meanwhile_are_not_taken_for_hidden(
    counts: tuple[int, int], seen: int, hidden: int
) -> None:
    mesh: Any = FakeMesh(tenants_ListQueues=queues(*counts), jobs_ListJobs=ListJobsResponse(total_size=seen))
    assert await lab_board.count_jobs(mesh) == [{"seen": seen, "hidden": hidden}]


async def test_the_page_has_what_is_there_and_says_what_is_missing() -> None:
    policies = [
        Policy(group="cotenant.queue_policies", name="las", healthy=True, summary="Least attained service."),
        Policy(group="cotenant.queue_policies", name="broken"),
        Policy(group="cotenant.cpu_allocators", name="requested", healthy=True, active=True),
        Policy(group="cotenant.predictors", name="history", healthy=True, active=True),
    ]
    mesh = FakeMesh(
        predictor_ListPolicies=ListPoliciesResponse(policies=policies),
        contention_ListPolicies=ListPoliciesResponse(policies=policies),
        nodes_ListNodes=ListNodesResponse(),
    )
    found = await lab_board.read(mesh.ask)
    assert [(one["group"], one["name"], one["active"]) for one in found["policies"]["rows"]] == [
        ("allocator", "requested", True), ("queue", "las", False),
    ]  # fmt: skip
    assert "full" in [one["name"] for one in found["profiles"]["rows"]]
    assert "no leader" in found["jobs"]["trouble"]
    assert found["nodes"]["trouble"] == ""


def test_a_snapshot_with_too_many_jobs_names_the_command_instead() -> None:
    assert "31,000 jobs, and the lab takes 20,000: use `cotenant snapshot" in too_many(31_000, 20_000)


# Processes ----------------------------------------------------------------------------------------------------------

RESULT = "echo 'progress {}'; echo 'result {\"a\":1}'"


def lab(script: str, seconds_max: float = 60.0) -> Lab:
    return Lab(["sh", "-c", script], seconds_max)


def run(at: Lab, principal: str = "amy") -> AsyncGenerator[Event]:
    return at.run(principal, lambda: Access(Endpoints.one("127.0.0.1:1")), [Choice("queue", "las")])


async def all_of(at: Lab, principal: str = "amy") -> list[Event]:
    """Return the events of a simulation, whose process has ended."""
    events = [one async for one in run(at, principal) if one.name]
    await at.ended(principal)
    return events


async def why(script: str, seconds_max: float = 60.0) -> str:
    [event] = await all_of(lab(script, seconds_max))
    assert event.name == "failed"
    return str(json.loads(event.data)["why"])


async def test_what_the_process_writes_is_passed_on_and_its_death_is_told() -> None:
    assert await all_of(lab(RESULT)) == [Event("progress", "{}"), Event("result", '{"a":1}')]
    assert "was killed by SIGKILL" in await why("kill -9 $$")
    assert "all of its 600 seconds of processor time" in await why("kill -XCPU $$")
    assert "ended with code 3" in await why("exit 3")
    assert "took longer than" in await why("exec sleep 600", 0.01)


async def test_a_principal_has_one_at_a_time_and_there_are_few_in_all() -> None:
    at = lab("echo 'progress {}'; exec sleep 600")
    names = [f"principal {number}" for number in range(RUNS_MAX)]
    async with contextlib.AsyncExitStack() as opened:
        for name in names:
            events = await opened.enter_async_context(contextlib.aclosing(run(at, name)))
            assert await anext(events) == Event("progress", "{}")
        [refused] = await all_of(at, "principal 0")
        assert "of yours runs already" in refused.data
        [refused] = await all_of(at, "another")
        assert f"{RUNS_MAX} simulations of others run now" in refused.data
    for name in names:
        await at.ended(name)


async def test_closing_a_run_ends_its_process_and_makes_room() -> None:
    at = lab("echo progress $$; exec sleep 600")
    for _ in range(2):
        events = run(at)
        pid = int((await anext(events)).data)
        await events.aclose()
        await asyncio.wait_for(at.ended("amy"), 30.0)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_mesh_that_is_not_found_leaves_room_for_the_next() -> None:
    at = lab(RESULT)

    def missing() -> Access:
        raise AccessError("no endpoint.json")

    [event] = [one async for one in at.run("amy", missing, [])]
    assert "the mesh is not found: no endpoint.json" in event.data
    assert len(await all_of(at)) == 2
