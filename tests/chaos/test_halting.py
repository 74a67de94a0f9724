"""A part with a fail point leads as soon as it can, and is let go on, or started anew, when its time is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.chaos import halting
from tests.chaos.halting import REACHED_SECONDS_MAX, Halts
from tests.chaos.judging import Absence
from tests.chaos.plan import Fault, Step

POINT = "queue.committed=stop@1"
STEP = Step(1, 0.5, Fault.FAIL_POINT, "queue-1", "queue-2", 3.0, point=POINT)


@dataclass
class Mesh:
    """What is done to it."""

    parts: dict[str, Any] = field(default_factory=lambda: {"queue-1": SimpleNamespace(points="")})
    serves: bool = False
    halted: bool = False
    did: list[str] = field(default_factory=list)

    def restart(self, name: str, points: str = "") -> str:
        self.did.append(f"restart {name} {points}".rstrip())
        if name in self.parts:
            self.parts[name].points = points
        return ""

    def serving(self, name: str) -> bool:
        return self.serves

    def has_halted(self, name: str) -> bool:
        return self.halted

    def disarm(self, name: str) -> None:
        self.did.append(f"disarm {name}")
        self.parts[name].points = ""


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(halting, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def test_the_other_replica_gives_way_and_who_halts_goes_on_after_its_time(pass_time: Callable[[float], None]) -> None:
    mesh, absence = Mesh(), Absence(frozenset(), 0.0)
    halts = Halts(cast("Any", mesh))
    assert halts.arm(STEP, absence) == ""
    assert halts.look() == []
    mesh.serves = True
    halts.look()
    halts.look()
    assert mesh.did == [f"restart queue-1 {POINT}", "restart queue-2"]
    mesh.halted = True
    halts.look()
    pass_time(STEP.seconds - 0.1)
    halts.look()
    assert (mesh.did[2:], absence.end) == ([], float("inf"))
    pass_time(0.2)
    halts.look()
    assert mesh.did[2:] == ["disarm queue-1"]
    assert absence.end < float("inf")
    halts.look()
    assert len(mesh.did) == 3


def test_who_does_not_come_to_its_fail_point_is_started_anew(pass_time: Callable[[float], None]) -> None:
    mesh, absence = Mesh(), Absence(frozenset(), 0.0)
    halts = Halts(cast("Any", mesh))
    halts.arm(STEP, absence)
    pass_time(REACHED_SECONDS_MAX)
    halts.look()
    assert mesh.did[1:] == ["disarm queue-1"]


def test_who_was_killed_or_started_by_another_fault_is_left_alone(pass_time: Callable[[float], None]) -> None:
    mesh, absence = Mesh(), Absence(frozenset(), 0.0)
    halts = Halts(cast("Any", mesh))
    halts.arm(STEP, absence)
    mesh.parts["queue-1"].points = ""
    halts.look()
    assert absence.end < float("inf")


def test_of_two_replicas_one_is_armed_at_a_time(pass_time: Callable[[float], None]) -> None:
    mesh = Mesh()
    halts = Halts(cast("Any", mesh))
    halts.arm(STEP, Absence(frozenset(), 0.0))
    other = Absence(frozenset(), 7.0)
    halts.arm(Step(2, 0.5, Fault.FAIL_POINT, "queue-2", "queue-1", 3.0, point=POINT), other)
    assert (mesh.did, other.end) == ([f"restart queue-1 {POINT}"], 7.0)
    halts.end()
    assert mesh.did[1:] == ["disarm queue-1"]
