"""A lasting fault is an error if `status` does not name it, or names something else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verification.chaos.mesh import EXPIRED, NO_STORE
from tests.verification.chaos.plan import LASTING_SECONDS, NODES, Fault, Step
from tests.verification.chaos.status_checker import NAMED_SECONDS_MAX, StatusChecker

NODE = "run-agent-1"


class Mesh:
    """The used subset of a mesh."""

    node_ids = {part: f"run-{part}" for part in NODES}  # noqa: RUF012  # never changed
    parts: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def __init__(self) -> None:
        self.offsets: dict[str, float] = {}
        self.logged = ""

    def log_size(self, part: str) -> int:
        return 0

    def log_since(self, part: str, begin: int) -> str:
        return self.logged

    def address(self, part: str) -> str:
        return f"at {part}"

    def clock_offset(self, part: str) -> float:
        return self.offsets.get(part, 0.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def answered(asker: StatusChecker, now: list[float], after: float, *problems: tuple[str, str]) -> list[str]:
    """Return an answer to a `status` that begins this many seconds later."""
    now[0] = asker._started_at = 100.0 + after
    asker._check_expected({"problems": [{"where": where, "what": what} for where, what in problems]})
    return asker.wrong


def asks(fault: Fault, part: str, seconds: float = LASTING_SECONDS[0], amount: float = 0.0) -> StatusChecker:
    mesh: Any = Mesh()
    asker = StatusChecker(mesh, not_launched={})
    asker._is_forgotten = lambda expected: False  # type: ignore[method-assign]  # no node is forgotten
    asker.begin(Step(1, 0.5, fault, part, seconds=seconds, amount=amount))
    return asker


def test_a_lasting_fault_that_is_not_named_in_time_is_an_error(now: list[float]) -> None:
    asker = asks(Fault.PAUSE, "agent-1")
    assert answered(asker, now, NAMED_SECONDS_MAX - 1, ("queue-1", "it does not answer")) == []
    (wrong,) = answered(asker, now, NAMED_SECONDS_MAX + 1, ("queue-1", "it does not answer"))
    assert "does not name run-agent-1" in wrong


def test_a_fault_named_in_time_is_no_error(now: list[float]) -> None:
    asker = asks(Fault.PAUSE, "agent-1")
    answered(asker, now, 12.0, (NODE, "its agent is away"))
    assert answered(asker, now, 60.0) == []
    assert asker.named_seconds == {"pause": 12.0}


def test_an_unrelated_problem_does_not_name_a_certificate(now: list[float]) -> None:
    asker = asks(Fault.EXPIRE, "queue-1")
    answered(asker, now, 5.0, ("queue at queue-1", "it does not answer"))
    assert asker.named_seconds == {}
    answered(asker, now, 6.0, ("queue at queue-1", "its certificate has expired"))
    assert asker.named_seconds == {"expire": 6.0}


@pytest.mark.parametrize("error", [f"error: {EXPIRED}: queue-1.pem was valid until yesterday", NO_STORE])
def test_a_part_that_cannot_start_with_its_expired_certificate_is_away(now: list[float], error: str) -> None:
    asker = asks(Fault.EXPIRE, "queue-1")
    asker.mesh.logged = error  # type: ignore[attr-defined]  # a stand-in
    answered(asker, now, 5.0, ("queue at queue-1", "the service cannot be reached: failed to connect"))
    assert asker.named_seconds == {"expire": 5.0}


def test_a_node_must_be_named_only_after_some_refused_launches(now: list[float]) -> None:
    asker = asks(Fault.REFUSE_LAUNCH, "agent-1")
    assert answered(asker, now, NAMED_SECONDS_MAX + 1) == []
    asker.not_launched = {NODE: 3}
    assert answered(asker, now, NAMED_SECONDS_MAX + 2) == []
    assert answered(asker, now, NAMED_SECONDS_MAX + 10) == []
    assert answered(asker, now, 2 * NAMED_SECONDS_MAX + 5) != []


def test_short_and_invisible_faults_need_not_be_named(now: list[float]) -> None:
    for asker in (asks(Fault.PAUSE, "agent-1", seconds=5.0), asks(Fault.STARVE, "agent-1")):
        assert answered(asker, now, 100.0) == []


@pytest.mark.parametrize(
    ("fault", "part", "amount", "problem"),
    [
        (
            Fault.STUTTER,
            "queue-1",
            2.0,
            ("queue at queue-1", "its event loop was behind by 1.9 s"),
        ),
        (Fault.STUTTER, "agent-1", 2.0, (NODE, "its agent is late: last heard 6s ago, expected every 2s")),
        (Fault.SLOW_STORE, "etcd", 0.4, ("store", "it takes 700 ms to answer (median of the last 30 s)")),
        (Fault.NAME_ERROR, "agent-1", 0.0, (NODE, "it cannot resolve queue.mesh: no answer within 13 s")),
    ],
)
def test_slow_parts_must_be_named_as_slow(
    now: list[float], fault: Fault, part: str, amount: float, problem: tuple[str, str]
) -> None:
    asker = asks(fault, part, amount=amount)
    answered(asker, now, 5.0, (problem[0], "it runs another release"))
    assert asker.named_seconds == {}
    answered(asker, now, 6.0, problem)
    assert asker.named_seconds == {str(fault): 6.0}
    now[0] = 100.0
    late = asks(fault, part, amount=amount)
    assert answered(late, now, NAMED_SECONDS_MAX + 1) != []
    now[0] = 100.0
    if amount:
        assert answered(asks(fault, part, amount=0.1), now, NAMED_SECONDS_MAX + 1) == []


def test_exactly_the_clocks_that_are_off_must_be_named() -> None:
    mesh: Any = Mesh()
    asker = StatusChecker(mesh, not_launched={})
    off = {"where": "queue at queue-1", "what": "its clock is 50 s ahead"}
    assert asker._clock_errors([]) == []
    assert asker._clock_errors([off]) == ["at queue-1: its clock is off by 0.0 s and named"]
    mesh.offsets["queue-1"] = 50.0
    assert asker._clock_errors([off]) == []
    assert asker._clock_errors([]) == ["at queue-1: its clock is off by 50.0 s and not named"]
