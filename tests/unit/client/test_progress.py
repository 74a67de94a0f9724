"""`cotenant.progress` in a loop: a step for each item."""

from __future__ import annotations

import socket
from pathlib import Path
from types import ModuleType

import pytest

from cotenant import progress


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The socket to which a job reports."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(tmp_path / "progress"))
    listening.setblocking(False)
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_reporter", progress._Reporter())
    return listening


def test_a_loop_reports_a_step_after_each_item_and_counts_on_in_the_next_epoch(agent: socket.socket) -> None:
    loader = progress.over(["a", "b"])
    assert [list(loader) for _ in range(2)] == [["a", "b"]] * 2
    assert [agent.recv(100).decode() for _ in range(4)] == ["step=1", "step=2", "step=3", "step=4"]
    assert list(progress.over([1], phase="validation")) == [1]
    assert agent.recv(100).decode() == "step=1 phase=validation"


def test_an_item_that_is_not_finished_is_no_step(agent: socket.socket) -> None:
    for item in progress.over([1, 2, 3]):
        if item == 2:
            break
    assert agent.recv(100).decode() == "step=1"
    with pytest.raises(BlockingIOError):
        agent.recv(100)


def test_the_module_may_be_called_and_keeps_the_length(agent: socket.socket) -> None:
    assert isinstance(progress, ModuleType)
    called = progress([1, 2, 3])  # type: ignore[operator]  # type checkers know no modules that can be called
    assert (len(called), list(called)) == (3, [1, 2, 3])
    generated = progress.over(number for number in range(2))
    with pytest.raises(TypeError):
        len(generated)  # type: ignore[arg-type]  # the test is about that
    assert list(generated) == [0, 1]


def test_an_error_of_the_loop_is_its_own(agent: socket.socket) -> None:
    def failing() -> object:
        yield 1
        raise OSError("bad disk")

    with pytest.raises(OSError, match="bad disk"):
        list(progress.over(failing()))  # type: ignore[arg-type]  # typed loosely
