"""`status` reports parts that are slow but alive and wrong clocks, but not parts that are merely busy."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin, node

from cotenant.cli.mesh.slowness import slowness_problems
from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import timestamp
from cotenant.v1.condition_pb2 import LoopLag
from cotenant.v1.node_service_pb2 import Node
from cotenant.v1.process_service_pb2 import GetProcessResponse, Process

ALL = "contention, placement, predictor, queue"


@pytest.fixture
def mesh(standin: Standin) -> Standin:
    """One process with all services, and a node."""
    standin.replicas.reported = GetProcessResponse(process=Process(version="1.0"))
    standin.nodes.nodes = {"gpu-1": node("gpu-1")}
    standin.nodes.nodes["gpu-1"].inventory.agent_version = "1.0"
    return standin


def problems(shell: Shell) -> list[tuple[str, str]]:
    reported = shell("status", "--json").json
    assert all(one["remedy"] for one in reported["problems"])
    return [(one["where"], one["what"]) for one in reported["problems"]]


def lag(longest: float, windows: int, median: float = 0.001, share: float = 0.3) -> LoopLag:
    made = LoopLag(behind_share=share, windows_behind=windows)
    made.longest.FromMilliseconds(round(longest * 1000))
    made.median.FromMilliseconds(round(median * 1000))
    return made


def takes(mesh: Standin, median: float, calls: int = 30) -> None:
    latency = mesh.replicas.reported.process.store_latency
    latency.calls = calls
    latency.median.FromMilliseconds(round(median * 1000))
    latency.longest.FromMilliseconds(round(3 * median * 1000))


def test_a_loop_that_lags_in_two_windows_is_reported_but_a_single_stall_is_not(shell: Shell, mesh: Standin) -> None:
    mesh.replicas.reported.process.loop_lag.CopyFrom(lag(4.0, 1))
    assert shell("status").code == ExitCode.DONE
    mesh.replicas.reported.process.loop_lag.CopyFrom(lag(1.2, 2))
    ((where, what),) = problems(shell)
    assert where == f"{ALL} {mesh.address}"
    assert what == "its event loop was behind by up to 1.2 s in the last 30 s, 30 % of the time"


def test_a_store_is_judged_by_its_median_after_enough_calls(shell: Shell, mesh: Standin) -> None:
    takes(mesh, 0.42)
    ((where, what),) = problems(shell)
    assert where == "store"
    assert what == f"slow to answer: median latency 420 ms in the last 30 s, measured by {ALL} {mesh.address}"
    for median, calls in ((0.09, 30), (0.42, 4)):
        takes(mesh, median, calls)
        assert problems(shell) == []


def test_a_process_with_a_lagging_loop_does_not_blame_the_store(shell: Shell, mesh: Standin) -> None:
    takes(mesh, 0.42)
    mesh.replicas.reported.process.loop_lag.CopyFrom(lag(0.5, 0, median=0.08))
    assert problems(shell) == []
    mesh.replicas.reported.process.loop_lag.CopyFrom(lag(0.5, 0, median=0.05))
    assert [where for where, _ in problems(shell)] == ["store"]


def test_a_late_or_lagging_agent_is_reported(shell: Shell, mesh: Standin) -> None:
    one = mesh.nodes.nodes["gpu-1"]
    one.heartbeat_interval.FromSeconds(2)
    one.silence.FromSeconds(3)
    assert problems(shell) == []
    one.loop_lag.CopyFrom(lag(2.9, 2))
    assert problems(shell) == [
        ("gpu-1", "its agent's event loop was behind by up to 2.9 s in the last 30 s, 30 % of the time")
    ]
    one.silence.FromSeconds(6)
    late = "its agent is late: last heartbeat 6s ago, expected every 2s"
    assert problems(shell) == [("gpu-1", late)]
    assert late in shell("nodes").out


def test_a_name_that_an_agent_cannot_resolve_is_reported(shell: Shell, mesh: Standin) -> None:
    mesh.nodes.nodes["gpu-1"].inventory.problems.add(
        check="names", action=1, reason="it cannot resolve queue.mesh: refused", remedy="see the name servers"
    )
    assert problems(shell) == [("gpu-1", "it cannot resolve queue.mesh: refused")]


def test_a_clock_far_from_the_local_clock_is_reported(shell: Shell, mesh: Standin) -> None:
    process = mesh.replicas.reported.process
    process.wall_time.CopyFrom(timestamp(time.time() + 86_400))
    assert (f"{ALL} {mesh.address}") in [
        where for where, what in problems(shell) if what.startswith("its clock is 86,")
    ]
    process.wall_time.CopyFrom(timestamp(time.time()))
    assert problems(shell) == []


def process(address: str, offset: float, **more: Any) -> dict[str, Any]:
    made = {"service": "queue", "address": address, "state": "follows", "loop_lag": None, "store_latency": None}
    return made | {"clock_offset_seconds": offset, "clock_error_seconds": 0.01} | more


def agent(name: str, offset: float) -> dict[str, Any]:
    unknown = dict.fromkeys(("loop_lag", "silence_seconds", "heartbeat_seconds"))
    return {"id": name, "state": "ready", "clock_offset_seconds": offset} | unknown


def off(*views: dict[str, Any], nodes: tuple[dict[str, Any], ...] = ()) -> list[tuple[str, str]]:
    return [(one.where, one.what) for one in slowness_problems(views, nodes)]


def test_most_clocks_are_right_even_if_the_local_clock_is_wrong() -> None:
    all_behind = [process("a:1", -100.0), process("b:1", -100.1), process("c:1", -100.2)]
    assert off(*all_behind) == [("this machine", "its clock is 100 s ahead")]
    assert off(process("a:1", 0.0), process("b:1", 1.9), process("c:1", -2.5)) == [
        ("queue c:1", "its clock is 2.5 s behind")
    ]


def test_network_delay_is_not_reported_as_a_clock_error() -> None:
    assert off(process("a:1", 4.0, clock_error_seconds=2.5)) == []


def test_an_agents_clock_is_relative_to_placements() -> None:
    leader = process("a:1", 50.0, service="placement", state="leads")
    others = process("b:1", 0.0), process("c:1", 0.1)
    found = off(leader, *others, nodes=(agent("right", -50.0), agent("wrong", 0.0)))
    assert found == [("placement a:1", "its clock is 50 s ahead"), ("wrong", "its clock is 50 s ahead")]


def test_one_process_with_several_services_has_one_vote() -> None:
    many = [process("a:1", 60.0, service=name) for name in ("contention", "placement", "queue")]
    assert off(*many) == [("contention, placement, queue a:1", "its clock is 60 s ahead")]


def test_an_older_release_without_reports_is_healthy(shell: Shell, mesh: Standin) -> None:
    assert not Node().HasField("loop_lag")
    reported = shell("status", "--json").json
    assert {one["loop_lag"] for one in reported["processes"]} == {None}
    assert reported["well"]
