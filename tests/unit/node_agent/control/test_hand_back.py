"""A node is handed back in time, whatever the occasion, and says goodbye only when nothing runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.attempt import Attempt
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.hand_back import HandBack
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.probes.outer_job import Nesting, OuterJob
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.supervisor.process_table import start_ticks
from cotenant.v1 import job_pb2

KEY = AttemptKey("job", 1)


@dataclass
class Manager:
    """Attempts that end as soon as they are stopped, unless they are deaf."""

    attempts: dict[AttemptKey, Attempt] = field(default_factory=dict)
    stops: list[agent_pb2.StopOrder] = field(default_factory=list)
    deaf: bool = False

    def stop(self, order: agent_pb2.StopOrder) -> None:
        self.stops.append(order)
        if not self.deaf:
            del self.attempts[AttemptKey(order.job_id, order.number)]


def running(grace_seconds: int = 30) -> dict[AttemptKey, Attempt]:
    assignment = agent_pb2.Assignment(job_id="job", number=1)
    assignment.spec.grace.FromSeconds(grace_seconds)
    return {KEY: Attempt(assignment, Status(KEY, 5, "RUNNING", 0.0), 0.0)}


async def handed_back(manager: Manager, *, stop: bool = False, **fields: Any) -> tuple[PlacementOutbox, list[str]]:
    outbox, reasons = PlacementOutbox(), []
    names = {"drain_time", "idle_seconds"} & fields.keys()
    job = OuterJob("slurm/7", "", **{name: value for name, value in fields.items() if name not in names})

    async def drain(reason: str) -> None:
        reasons.append(reason)

    nesting = Nesting(job, **{name: fields[name] for name in names})
    asked = asyncio.Event()
    if stop:
        asked.set()
    async with asyncio.timeout(10):
        await HandBack(nesting, cast(AttemptManager, manager), outbox, drain).run(asked)
    return outbox, reasons


async def test_sigterm_stops_everything_within_the_time_before_the_kill() -> None:
    manager = Manager(running(grace_seconds=3600))
    outbox, reasons = await handed_back(manager, stop=True, kill_wait_seconds=20.0)
    [order] = manager.stops
    assert (order.epoch, order.reason) == (5, job_pb2.STOP_REASON_DRAINED)
    assert 14 < order.grace.ToMicroseconds() / 1e6 <= 15
    assert reasons == ["Slurm job 7 is being ended"]
    assert outbox.take().goodbye.reason == "Slurm job 7 is being ended"


async def test_a_shorter_grace_is_kept() -> None:
    manager = Manager(running(grace_seconds=2))
    await handed_back(manager, stop=True, kill_wait_seconds=20.0)
    assert manager.stops[0].grace.ToMicroseconds() == 2_000_000


async def test_there_is_no_goodbye_while_something_runs() -> None:
    manager = Manager(running(), deaf=True)
    outbox, _ = await handed_back(manager, stop=True, kill_wait_seconds=0.5)
    assert len(manager.stops) == 1
    assert not outbox.take().HasField("goodbye")


@pytest.mark.parametrize("seconds_left", [3.0, -5.0])
async def test_the_time_of_the_outer_job_is_an_occasion(seconds_left: float) -> None:
    manager = Manager(running(grace_seconds=3600))
    end = time.time() + seconds_left
    outbox, reasons = await handed_back(manager, drain_time=time.time(), end_time=end, kill_wait_seconds=4.0)
    assert reasons == ["the time of Slurm job 7 is nearly over"]
    assert manager.stops[0].grace.ToMicroseconds() / 1e6 < 4
    assert outbox.said_goodbye


async def test_an_idle_agent_ends() -> None:
    _, reasons = await handed_back(Manager(), idle_seconds=0.2)
    assert reasons == ["it had nothing to run for 0.2 s"]


async def test_the_end_of_the_watched_process_is_an_occasion() -> None:
    step = await asyncio.create_subprocess_exec("sleep", "60")
    process = step.pid, start_ticks(step.pid)
    task = asyncio.create_task(handed_back(Manager(running()), process=process))
    await asyncio.sleep(0)  # it watches
    step.kill()
    await step.wait()
    _, reasons = await task
    assert reasons == ["Slurm job 7 ended"]
    _, reasons = await handed_back(Manager(running()), process=process)  # it was gone before
    assert reasons == ["Slurm job 7 ended"]
