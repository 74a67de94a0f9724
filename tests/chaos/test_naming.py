"""A fault that lasts is wrong where `status` does not name it, and where it names something else instead."""

from __future__ import annotations

from typing import Any

import pytest
from tests.chaos.naming import NAMED_SECONDS, Naming
from tests.chaos.plan import LASTING_SECONDS, Fault, Step

NODE = "run-agent-1"


class Mesh:
    """As much of a mesh as is asked for."""

    node_ids = {"agent-1": NODE}  # noqa: RUF012  # never changed
    parts: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def address(self, part: str) -> str:
        return f"at {part}"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def answered(asker: Naming, now: list[float], after: float, *problems: tuple[str, str]) -> list[str]:
    """Let an answer come to a question that is asked so many seconds later."""
    now[0] = asker._asked_at = 100.0 + after
    asker._judge({"problems": [{"where": where, "what": what} for where, what in problems]})
    return asker.wrong


def asks(fault: Fault, part: str, seconds: float = LASTING_SECONDS[0]) -> Naming:
    mesh: Any = Mesh()
    asker = Naming(mesh, not_launched={})
    asker._is_given_up = lambda lasting: False  # type: ignore[method-assign]  # nobody has given up anything
    asker.begin(Step(1, 0.5, fault, part, seconds=seconds))
    return asker


def test_what_lasts_and_is_never_named_is_wrong_once_it_is_late(now: list[float]) -> None:
    asker = asks(Fault.PAUSE, "agent-1")
    assert answered(asker, now, NAMED_SECONDS - 1, ("queue-1", "it does not answer")) == []
    (wrong,) = answered(asker, now, NAMED_SECONDS + 1, ("queue-1", "it does not answer"))
    assert "does not name run-agent-1" in wrong


def test_what_is_named_in_time_is_well(now: list[float]) -> None:
    asker = asks(Fault.PAUSE, "agent-1")
    answered(asker, now, 12.0, (NODE, "its agent is away"))
    assert answered(asker, now, 60.0) == []
    assert asker.named_seconds == {"pause": 12.0}


def test_a_problem_of_another_kind_names_no_certificate(now: list[float]) -> None:
    asker = asks(Fault.EXPIRE, "queue-1")
    answered(asker, now, 5.0, ("queue at queue-1", "it does not answer"))
    assert asker.named_seconds == {}
    answered(asker, now, 6.0, ("queue at queue-1", "its certificate has expired"))
    assert asker.named_seconds == {"expire": 6.0}


def test_a_node_has_to_be_named_only_once_it_has_refused_some_launches(now: list[float]) -> None:
    asker = asks(Fault.REFUSE_LAUNCH, "agent-1")
    assert answered(asker, now, NAMED_SECONDS + 1) == []
    asker.not_launched = {NODE: 3}
    assert answered(asker, now, NAMED_SECONDS + 2) == []
    assert answered(asker, now, NAMED_SECONDS + 10) == []
    assert answered(asker, now, 2 * NAMED_SECONDS + 5) != []


def test_nothing_is_expected_of_what_is_short_or_cannot_be_seen(now: list[float]) -> None:
    for asker in (asks(Fault.PAUSE, "agent-1", seconds=5.0), asks(Fault.STUTTER, "agent-1")):
        assert answered(asker, now, 100.0) == []
