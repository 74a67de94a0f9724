"""The first process that reaches an armed fail point stays down or stopped for a while; further faults wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.verification.chaos import armed_points
from tests.verification.chaos.armed_points import HALTED_SECONDS, STEP_DOWN_SECONDS, ArmedPoints
from tests.verification.chaos.judge import Absence
from tests.verification.chaos.plan import NODES, Fault, Step

POINT = "placement.committed"
PID = 17


@dataclass
class Mesh:
    """Records calls; `came` has the parts that reach fail points."""

    came: dict[str, str] = field(default_factory=dict)  # by fail point: the part
    did: list[str] = field(default_factory=list)
    node_ids: dict[str, str] = field(default_factory=lambda: {node: node for node in NODES})

    def arm(self, point: str, action: str) -> None:
        self.did.append(f"arm {point} {action}")

    def disarm(self, point: str) -> None:
        self.did.append(f"disarm {point}")

    def take_reached(self, point: str) -> tuple[str, int, float] | None:
        return (self.came.pop(point), PID, 0.5) if point in self.came else None

    def part_at(self, address: str) -> str:
        return address

    def is_running(self, name: str) -> bool:
        return True

    def restart(self, name: str) -> str:
        self.did.append(f"restart {name}")
        return ""

    def kill(self, name: str) -> None:
        self.did.append(f"kill {name}")

    def bring_back(self, name: str) -> None:
        self.did.append(f"come back {name}")

    def thaw(self, name: str, pid: int) -> None:
        self.did.append(f"thaw {name} {pid}")


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(armed_points, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def a_step(action: str, point: str = POINT) -> Step:
    return Step(1, 0.5, Fault.FAIL_POINT, "placement", seconds=4.0, point=f"{point}={action}")


def absence() -> Absence:
    return Absence(frozenset(), 0.0)


def armed(mesh: Mesh, *steps: Step) -> ArmedPoints:
    armed_points = ArmedPoints(cast("Any", mesh), lambda: {"placement": "placement-2"})
    for step in steps:
        armed_points.arm(step, absence())
    armed_points.poll()
    mesh.did.clear()
    return armed_points


@pytest.mark.parametrize(
    ("action", "did"),
    [("stop@2", [f"thaw placement-1 {PID}"]), ("kill@1", ["kill placement-1", "come back placement-1"])],
)
def test_a_process_at_a_fail_point_is_absent_for_the_step_duration(
    pass_time: Callable[[float], None], action: str, did: list[str]
) -> None:
    mesh, away = Mesh(), absence()
    armed_points = ArmedPoints(cast("Any", mesh), dict)
    armed_points.arm(a_step(action), away)
    assert armed_points.poll() == []
    assert (mesh.did, away.node_ids) == ([f"arm {POINT} {action}"], frozenset())
    mesh.came[POINT] = "placement-1"
    armed_points.poll()
    assert (away.node_ids, away.end) == (frozenset(NODES), float("inf"))
    assert armed_points.reached == {f"{POINT} ({action[:4]})": 1}
    pass_time(3.9)
    armed_points.poll()
    assert away.end == float("inf")
    pass_time(0.2)
    armed_points.poll()
    assert mesh.did[1:] == did
    assert away.begin < away.end < float("inf")
    assert not armed_points.is_settling()


def test_a_point_is_armed_for_one_fault_at_a_time(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    armed_points = armed(mesh, a_step("kill@1"), a_step("stop@1"), a_step("stop@1", "placement.started"))
    mesh.came[POINT] = "placement-1"
    armed_points.poll()
    armed_points.poll()
    assert mesh.did == ["kill placement-1", f"arm {POINT} stop@1"]


def test_leaders_step_down_until_a_new_one_reaches_the_point(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    armed_points = armed(mesh, a_step("kill@1", "election.won"))
    armed_points.poll()
    armed_points.poll()
    assert mesh.did == ["restart placement-2"]
    pass_time(STEP_DOWN_SECONDS)
    armed_points.poll()
    assert mesh.did == ["restart placement-2"] * 2
    mesh.came["election.won"] = "placement-1"
    pass_time(STEP_DOWN_SECONDS)
    armed_points.poll()
    assert mesh.did[2:] == ["kill placement-1"]


def test_a_queue_steps_down_only_if_there_are_jobs_to_remove(pass_time: Callable[[float], None]) -> None:
    mesh, much = Mesh(), [False]
    armed_points = ArmedPoints(cast("Any", mesh), lambda: {"placement": "placement-2"}, lambda: much[0])
    armed_points.arm(a_step("kill@1", "upkeep.archived"), absence())
    armed_points.poll()
    armed_points.poll()
    assert mesh.did == ["arm upkeep.archived kill@1"]
    much[0] = True
    armed_points.poll()
    assert mesh.did[1:] == ["restart placement-2"]
    mesh.came["upkeep.archived"] = "placement-2"
    armed_points.poll()
    assert armed_points.armed == {"upkeep.archived": 1}
    assert armed_points.reached == {"upkeep.archived (kill)": 1}


def test_stops_are_short_at_rest_and_points_are_disarmed_at_the_end(
    pass_time: Callable[[float], None],
) -> None:
    mesh = Mesh()
    armed_points = armed(mesh, a_step("stop@1"), a_step("stop@1", "placement.started"), a_step("stop@1"))
    mesh.came[POINT] = "placement-1"
    armed_points.poll()
    assert armed_points.is_settling()
    pass_time(HALTED_SECONDS)
    armed_points.poll()
    mesh.did.clear()
    armed_points.end()
    assert mesh.did == ["disarm placement.started", f"disarm {POINT}"]
    assert armed_points.reached.total() == 1
    assert not armed_points.is_settling()


def test_a_part_that_has_ended_in_between_is_left_alone(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    armed_points = armed(mesh, a_step("kill@1"))
    mesh.came[POINT] = ""
    armed_points.poll()
    pass_time(5.0)
    armed_points.poll()
    assert mesh.did == []
    assert armed_points.reached.total() == 1
