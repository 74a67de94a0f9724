"""Assignments that no honest placement would send: each ends with a clear reason and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.end_to_end.remains import processes_of
from tests.support.properties import examples
from tests.unit.node_agent.conditions import PATIENCE_SECONDS, until
from tests.unit.node_agent.conftest import RunningAgent
from tests.unit.node_agent.jobs import CPUS, assignment, profile_order, resize_order, shell, stop_order, task
from tests.unit.node_agent.placement import Placement

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.specs import duration
from cotenant.node_agent.enforcement import cgroup_mounts
from cotenant.node_agent.runtime.attempt_status import AttemptKey, Status
from cotenant.node_agent.runtime.process_runtime import ProcessRuntime
from cotenant.node_agent.runtime.runtime_port import RuntimeContext
from cotenant.node_agent.runtime.socket_paths import socket_directory
from cotenant.v1 import job_pb2, resources_pb2

FAILED = job_pb2.ATTEMPT_STATE_FAILED
INVENTORY = resources_pb2.Inventory(
    cores=[resources_pb2.Core(id=cpu, cpus=[cpu]) for cpu in CPUS],
    gpus=[resources_pb2.Gpu(uuid="GPU-0", declared=True)],
    memory_bytes=1 << 32,
)
MESSAGE_LENGTH_MAX = 1_000
MIB = 1 << 20
HERE = f"hostile-{os.getpid()}"  # whose groups nobody else touches

odd_text = st.text(max_size=8) | st.sampled_from(["", "\0", "a\0b", "../..", "/", "=", "\n", "é" * 300, "x" * 200_000])
odd_number = st.sampled_from([-(2**31), -1, 0, 1, 2, 7, 2**31 - 1])
odd_seconds = st.sampled_from([-1.0, 0.0, 0.2, 3.0, 3e8, 9e9])
programs = st.sampled_from([["true"], ["/bin/echo"], ["sh", "-c", "exit 3"], ["/no/such"], ["/"], [""], ["\0"], []])


@st.composite
def tasks(draw: st.DrawFn) -> resources_pb2.TaskAllocation:
    """One replica, more often sensible than not."""
    if draw(st.integers(0, 2)):
        return task(rank=draw(st.sampled_from([0, 1])), cpus=draw(st.sampled_from([[], CPUS[:1]])))
    cpus = draw(st.sampled_from([[], CPUS[:1], CPUS[-1:], [10**6], [-1], list(range(5_000)), CPUS[:1] * 2]))
    return resources_pb2.TaskAllocation(
        role=draw(st.sampled_from(["worker", "ps", ""]) | odd_text),
        rank=draw(st.sampled_from([0, 1]) | odd_number),
        core_ids=draw(st.sampled_from([cpus, cpus, []])),
        cpu_ids=cpus,
        memory_nodes=draw(st.sampled_from([[], [0], [-1], [4096]])),
        memory_bytes=draw(st.sampled_from([0, 64 * MIB, -1, 1, 2**63 - 1])),
        gpus=draw(
            st.lists(
                st.builds(resources_pb2.GpuShare, uuid=st.sampled_from(["GPU-0", ""]), milli=odd_number), max_size=2
            )
        ),
    )


@st.composite
def assignments(draw: st.DrawFn) -> agent_pb2.Assignment:
    """Return any encodable assignment with a harmless program: a valid one with some odd parts."""

    def odd(sensible: Any, strange: st.SearchStrategy[Any]) -> Any:
        return draw(strange) if draw(st.integers(0, 9)) == 0 else sensible

    command = [*draw(programs), *odd([], st.lists(odd_text, max_size=2))]
    places = st.sampled_from(["/", "/no/such", "relative", "/etc/passwd", "/a\0b"])
    spec = job_pb2.JobSpec(
        command=command,
        environment=odd({}, st.dictionaries(odd_text, odd_text, max_size=2)),
        working_directory=odd("", places),
        warning_signal=odd("", st.sampled_from(["SIGUSR1", "SIGKILL", "9", "\0"])),
    )
    if seconds := odd(None, odd_seconds):
        spec.grace.CopyFrom(duration(seconds))
    if seconds := odd(None, odd_seconds):
        spec.stop_after_disconnected.CopyFrom(duration(seconds))
    if seconds := odd(None, odd_seconds):
        spec.time_limit.CopyFrom(duration(seconds))
    spec.progress.regex = odd("", st.sampled_from(["step ([0-9]+)", "(", "(a*)*$"]))
    parts = draw(st.lists(tasks(), min_size=1, max_size=2)) if odd(True, st.just(False)) else []
    roles = odd([], st.lists(st.sampled_from(["ps", "worker"]), max_size=3))
    return agent_pb2.Assignment(
        job_id=odd("job-1", st.sampled_from(["x-1", "", "..", "../x", "a/b", "é", "y" * 128, "z" * 129])),
        number=odd(1, odd_number),
        epoch=odd(10, odd_number),
        spec=spec,
        allocation=resources_pb2.NodeAllocation(node_id=odd(HERE, st.just("another")), tasks=parts),
        world_size=odd(2, odd_number),
        node_rank=odd(0, odd_number),
        replica_roles=roles,
        replica_addresses=odd(roles, st.just(["a"])),
        master_address="127.0.0.1",
        master_port=odd(29500, odd_number),
        trace_parent=odd("", st.sampled_from(["garbage", "\0"])),
    )


class Runs:
    """A runtime and the ends that it reports."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir, self.ends = state_dir, dict[AttemptKey, Status]()
        self.runtime = ProcessRuntime()

    def take(self, status: Status) -> None:
        if status.ended:
            self.ends[status.key] = status

    async def wait_for_end(self, job: agent_pb2.Assignment) -> Status:
        """Launch it, and wait for its end."""
        key = AttemptKey(job.job_id, job.number)
        await self.runtime.launch(job)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while key not in self.ends:  # noqa: ASYNC110  # other processes set no events of ours
                await asyncio.sleep(0.002)
        await self.runtime.forget(key)
        return self.ends[key]


@asynccontextmanager
async def opened(state_dir: Path) -> AsyncIterator[Runs]:
    runs = Runs(state_dir)
    os.makedirs(state_dir, exist_ok=True)
    context = RuntimeContext(HERE, state_dir, INVENTORY, MIB, kept_max=0, kept_seconds_max=0)
    await runs.runtime.open(context, runs.take)
    try:
        yield runs
    finally:
        await runs.runtime.close()


def groups_here() -> list[str]:
    """All control groups of attempts."""
    group = cgroup_mounts.open_node_group(HERE)
    paths = [entry for path in group.paths() for entry in Path(path).iterdir()] if group else []
    return [str(path) for path in paths if path.is_dir()]


@pytest.fixture
def node_group() -> Iterator[None]:
    yield
    if group := cgroup_mounts.open_node_group(HERE):
        group.remove()


@pytest.mark.usefixtures("node_group")
@settings(deadline=None, max_examples=examples(80), suppress_health_check=list(HealthCheck))
@given(job=assignments())
def test_any_assignment_ends_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory, job: object) -> None:
    assert isinstance(job, agent_pb2.Assignment)

    async def run() -> None:
        async with opened(tmp_path_factory.getbasetemp() / "hostile") as runs:
            end = await runs.wait_for_end(job)
            assert len(end.message) <= MESSAGE_LENGTH_MAX
            assert "Traceback" not in end.message
            assert end.state != "FAILED" or end.message
            assert os.listdir(runs.state_dir / "attempts") == os.listdir(runs.state_dir / "kept") == []
            assert os.listdir(socket_directory(runs.state_dir)) in ([], ["notify"])
            assert not groups_here()

    asyncio.run(run())
    assert not processes_of(tmp_path_factory.getbasetemp() / "hostile")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"replica_roles": ["worker"] * 2}, "2 replica roles and 0 addresses are given for a gang of 1"),
        ({"replica_roles": ["ps"], "replica_addresses": ["a", "b"]}, "1 replica roles and 2 addresses are given"),
        ({"number": -1}, "invalid attempt number -1: numbers begin at 1"),
        ({"world_size": -5}, "rank 0 is not within a gang of -5"),
    ],
)
async def test_inconsistencies_are_named(
    placement: Placement, agent: RunningAgent, change: dict[str, object], words: str
) -> None:
    job = shell("odd", "true")
    job.MergeFrom(agent_pb2.Assignment(**change))  # type: ignore[arg-type]  # one field of it
    placement.assign(job)
    end = await placement.ended("odd", job.number)
    assert end.state == (FAILED if "number" in change else job_pb2.ATTEMPT_STATE_NOT_LAUNCHED)
    assert words in end.message


async def test_ten_mebibytes_of_arguments_are_refused_with_the_kernels_message(
    placement: Placement, agent: RunningAgent
) -> None:
    placement.assign(assignment("huge", ["/bin/echo", *(["x" * 100_000] * 105)]))
    assert (await placement.ended("huge")).message.endswith("cannot run /bin/echo: Argument list too long")


async def test_a_long_list_of_unknown_cores_gives_a_short_message(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("many", "true", tasks=[task(cpus=range(1_000, 200_000))]))
    end = await placement.ended("many")
    assert end.message.startswith("rank 0 was given CPUs that this node does not have: [1000, 1001")
    assert len(end.message) <= MESSAGE_LENGTH_MAX


@pytest.mark.parametrize("grace_seconds", [3e8, 9e9])
async def test_a_grace_of_years_is_accepted(
    placement: Placement, agent: RunningAgent, tmp_path: Path, grace_seconds: float
) -> None:
    placement.assign(shell("patient", "trap '' TERM; while :; do sleep 0.02; done"))
    await placement.running("patient")
    placement.send(stops=[stop_order("patient", grace_seconds=grace_seconds)])
    await placement.until(lambda: "STOPPING" in placement.states("patient"))
    placement.send(stops=[stop_order("patient", grace_seconds=0)])
    end = await placement.ended("patient")
    assert (end.state, end.message) == (job_pb2.ATTEMPT_STATE_STOPPED, "")


async def test_orders_for_ended_or_unknown_attempts_are_refused(placement: Placement, agent: RunningAgent) -> None:
    placement.assign(shell("over", "exit 4"))
    await placement.ended("over")
    before = sorted(os.listdir(agent.config.state_dir / "attempts"))
    placement.send(
        resizes=[resize_order("over", task(cpus=CPUS[:1]), epoch=11), resize_order("never", task(), epoch=12)],
        profiles=[profile_order("over", 1), profile_order("never", 1)],
        stops=[stop_order("over", epoch=3, grace_seconds=0), stop_order("never", grace_seconds=0)],
        acks=[agent_pb2.AttemptAck(job_id="never", number=1)],
    )
    assert await placement.answered(11) == "already ended"
    assert await placement.answered(12) == "unknown on this node"
    assert {(report.job_id, report.message) for report in await placement.profile_over(2)} == {
        ("over", "it is not running"),
        ("never", "unknown on this node"),
    }
    assert (await placement.ended("never")).message == "unknown on this node"
    await until(lambda: placement.states("over").count("FAILED") >= 2)
    assert sorted(os.listdir(agent.config.state_dir / "attempts")) == before
