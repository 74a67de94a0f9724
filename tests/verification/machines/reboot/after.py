"""The state after a power cut, on a machine that comes back with fewer CPUs than before."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from tests.unit.node_agent.conditions import until
from tests.unit.node_agent.conftest import RunningAgent, end_jobs
from tests.unit.node_agent.jobs import shell, task
from tests.unit.node_agent.placement import TERMINAL_STATES, Placement
from tests.verification.machines.reboot.agents import DISK, ENDED, RUNNING, STARTS, agent_on_disk

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.v1 import job_pb2

pytestmark = pytest.mark.root


@pytest.fixture
async def agent(placement: Placement) -> AsyncIterator[RunningAgent]:
    running = agent_on_disk(placement)
    await running.start()
    await placement.connected()
    yield running
    await running.stop()
    await end_jobs(DISK / "state")


async def told(placement: Placement, job_id: str) -> agent_pb2.AttemptReport:
    """Return how a job ended, from the agent's hello or a later report."""

    def end() -> agent_pb2.AttemptReport | None:
        greetings = (
            report for hello in placement.hellos for report in hello.attempts if report.state in TERMINAL_STATES
        )
        return placement.end(job_id) or next((report for report in greetings if report.job_id == job_id), None)

    found: agent_pb2.AttemptReport = await placement.until(end)
    return found


async def test_a_power_cut_fails_running_jobs_keeps_recorded_ends_and_restarts_nothing(
    placement: Placement, agent: RunningAgent
) -> None:
    running, ended = await told(placement, RUNNING), await told(placement, ENDED)
    assert running.state == job_pb2.ATTEMPT_STATE_FAILED
    assert running.message
    assert (ended.state, ended.exit.code) == (job_pb2.ATTEMPT_STATE_FAILED, 4)
    assert {path.name: path.read_text() for path in STARTS.iterdir() if path.name != "pid"} == {
        ENDED: "x\n",
        RUNNING: "x\n",
    }


async def test_the_current_cpus_are_offered_and_used(placement: Placement, agent: RunningAgent) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    inventory = placement.hellos[-1].inventory
    assert sorted(cpu for core in inventory.cores for cpu in core.cpus) == cpus
    placement.assign(shell("new", f"sleep 6000 & echo $! > {DISK}/new; wait", tasks=[task(cpus=cpus)], epoch=20))
    await placement.running("new")
    pid = await until(lambda: (DISK / "new").exists() and int((DISK / "new").read_text() or 0))
    assert os.sched_getaffinity(pid) == set(cpus)
