"""A fail point waits for whoever comes first, who stays down or halted for a while; others wait for their turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.verification.chaos import halting
from tests.verification.chaos.halting import GIVES_WAY_SECONDS, HALTED_SECONDS, Halts
from tests.verification.chaos.judging import Absence
from tests.verification.chaos.plan import NODES, Fault, Step

POINT = "placement.committed"
PID = 17


@dataclass
class Mesh:
    """What is done to it, and who comes to a fail point."""

    came: dict[str, str] = field(default_factory=dict)  # by fail point: which part
    did: list[str] = field(default_factory=list)
    node_ids: dict[str, str] = field(default_factory=lambda: {node: node for node in NODES})

    def arm(self, point: str, action: str) -> None:
        self.did.append(f"arm {point} {action}")

    def disarm(self, point: str) -> None:
        self.did.append(f"disarm {point}")

    def taken(self, point: str) -> tuple[str, int, float] | None:
        return (self.came.pop(point), PID, 0.5) if point in self.came else None

    def at(self, address: str) -> str:
        return address

    def runs(self, name: str) -> bool:
        return True

    def restart(self, name: str) -> str:
        self.did.append(f"restart {name}")
        return ""

    def kill(self, name: str) -> None:
        self.did.append(f"kill {name}")

    def come_back(self, name: str) -> None:
        self.did.append(f"come back {name}")

    def thaw(self, name: str, pid: int) -> None:
        self.did.append(f"thaw {name} {pid}")


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(halting, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def a_step(action: str, point: str = POINT) -> Step:
    return Step(1, 0.5, Fault.FAIL_POINT, "placement", seconds=4.0, point=f"{point}={action}")


def absence() -> Absence:
    return Absence(frozenset(), 0.0)


def armed(mesh: Mesh, *steps: Step) -> Halts:
    halts = Halts(cast("Any", mesh), lambda: {"placement": "placement-2"})
    for step in steps:
        halts.arm(step, absence())
    halts.look()
    mesh.did.clear()
    return halts


@pytest.mark.parametrize(
    ("action", "did"),
    [("stop@2", [f"thaw placement-1 {PID}"]), ("kill@1", ["kill placement-1", "come back placement-1"])],
)
def test_who_comes_to_a_fail_point_is_away_for_its_time(
    pass_time: Callable[[float], None], action: str, did: list[str]
) -> None:
    mesh, away = Mesh(), absence()
    halts = Halts(cast("Any", mesh), dict)
    halts.arm(a_step(action), away)
    assert halts.look() == []
    assert (mesh.did, away.node_ids) == ([f"arm {POINT} {action}"], frozenset())
    mesh.came[POINT] = "placement-1"
    halts.look()
    assert (away.node_ids, away.end) == (frozenset(NODES), float("inf"))
    assert halts.reached == {f"{POINT} ({action[:4]})": 1}
    pass_time(3.9)
    halts.look()
    assert away.end == float("inf")
    pass_time(0.2)
    halts.look()
    assert mesh.did[1:] == did
    assert away.begin < away.end < float("inf")
    assert not halts.settling()


def test_one_is_waited_for_at_a_time(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    halts = armed(mesh, a_step("kill@1"), a_step("stop@1"), a_step("stop@1", "placement.started"))
    mesh.came[POINT] = "placement-1"
    halts.look()
    halts.look()
    assert mesh.did == ["kill placement-1", f"arm {POINT} stop@1"]


def test_who_leads_gives_way_until_somebody_comes_to_lead(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    halts = armed(mesh, a_step("kill@1", "election.won"))
    halts.look()
    halts.look()
    assert mesh.did == ["restart placement-2"]
    pass_time(GIVES_WAY_SECONDS)
    halts.look()
    assert mesh.did == ["restart placement-2"] * 2
    mesh.came["election.won"] = "placement-1"
    pass_time(GIVES_WAY_SECONDS)
    halts.look()
    assert mesh.did[2:] == ["kill placement-1"]


def test_a_queue_gives_way_only_while_there_is_something_to_forget(pass_time: Callable[[float], None]) -> None:
    mesh, much = Mesh(), [False]
    halts = Halts(cast("Any", mesh), lambda: {"placement": "placement-2"}, lambda: much[0])
    halts.arm(a_step("kill@1", "upkeep.archived"), absence())
    halts.look()
    halts.look()
    assert mesh.did == ["arm upkeep.archived kill@1"]
    much[0] = True
    halts.look()
    assert mesh.did[1:] == ["restart placement-2"]
    mesh.came["upkeep.archived"] = "placement-2"
    halts.look()
    assert halts.armed == {"upkeep.archived": 1}
    assert halts.reached == {"upkeep.archived (kill)": 1}


def test_at_rest_who_is_halted_is_not_for_long_and_nobody_is_waited_for_at_the_end(
    pass_time: Callable[[float], None],
) -> None:
    mesh = Mesh()
    halts = armed(mesh, a_step("stop@1"), a_step("stop@1", "placement.started"), a_step("stop@1"))
    mesh.came[POINT] = "placement-1"
    halts.look()
    assert halts.settling()
    pass_time(HALTED_SECONDS)
    halts.look()
    mesh.did.clear()
    halts.end()
    assert mesh.did == ["disarm placement.started", f"disarm {POINT}"]
    assert halts.reached.total() == 1
    assert not halts.settling()


def test_who_has_ended_meanwhile_is_left_alone(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    halts = armed(mesh, a_step("kill@1"))
    mesh.came[POINT] = ""
    halts.look()
    pass_time(5.0)
    halts.look()
    assert mesh.did == []
    assert halts.reached.total() == 1
