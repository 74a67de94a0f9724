"""`cotenant.progress` in a loop: a step for each item."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_runs_of_experiment_trackers_are_reported(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow and Weights & Biases are stand-ins here, with the calls of theirs that are used."""
    mlflow = SimpleNamespace(active_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="1f3c")))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    monkeypatch.setenv("WANDB_RUN_ID", "odd id\n")
    progress.step()
    assert agent.recv(100).decode() == "step=1\nmlflow_run=1f3c wandb_run=odd_id_"
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(id="x7")))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: None))
    progress.step()
    assert agent.recv(100).decode() == "step=2\nwandb_run=x7"


def test_a_broken_tracker_does_not_break_the_job(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(active_run=lambda: 1 / 0))
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setenv("MLFLOW_RUN_ID", "1f3c")
    progress.step()
    assert agent.recv(100).decode() == "step=1\nmlflow_run=1f3c"
