"""The operator for Airflow, with a stand-in for Airflow's base class and for the client."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

TASK = {"dag_id": "nightly", "run_id": "r1", "task_id": "train", "map_index": -1, "try_number": 1}


class BaseOperator:
    """Airflow's, as far as it is used."""

    log = logging.getLogger("airflow.task")

    def __init__(self, *, task_id: str, **kwargs: Any) -> None:
        self.task_id = task_id


class Client:
    """Keeps what it is asked for."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, **connection: Any) -> None:
        self.calls.append(connection)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def submit(self, command: object, **fields: Any) -> Any:
        self.calls.append((command, fields))
        return SimpleNamespace(id="j1", logs=lambda: iter(["step 1"]), result=lambda: "done\n")

    def job(self, job_id: str) -> Any:
        return SimpleNamespace(cancel=lambda: self.calls.append(f"cancel {job_id}"))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module with the operator, as Airflow 2 would import it."""
    name = "cotenant.client.airflow_operator"
    monkeypatch.setitem(sys.modules, "airflow.sdk", None)
    monkeypatch.setitem(sys.modules, "airflow", ModuleType("airflow"))
    monkeypatch.setitem(sys.modules, "airflow.models", SimpleNamespace(BaseOperator=BaseOperator))
    sys.modules.pop(name, None)
    module = import_module(name)
    monkeypatch.setattr(module, "Client", Client)
    monkeypatch.setattr(Client, "calls", [])
    yield module
    sys.modules.pop(name, None)


def test_a_task_is_a_job_with_its_output_in_the_log(operators: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = {"gpus": 1, "retries": 2}
    operator = operators.CotenantOperator(task_id="train", command=["true"], fields=fields, connection={"token": "t"})
    assert operator.execute({"ti": SimpleNamespace(**TASK)}) == "done\n"
    connection, (command, given) = Client.calls
    assert (connection, command) == ({"token": "t"}, ["true"])
    request_id = given.pop("request_id")
    assert given == fields
    assert caplog.messages == ["job j1", "step 1"]
    same, other = (operators.request_id_of(SimpleNamespace(**{**TASK, "try_number": n})) for n in (1, 2))
    assert (request_id == same, request_id == other) == (True, False)


def test_a_task_that_is_killed_cancels_its_job(operators: ModuleType) -> None:
    operator = operators.CotenantOperator(task_id="train", command="true")
    operator.on_kill()
    assert Client.calls == [], "it has not begun"
    operator.execute({"ti": SimpleNamespace(**TASK)})
    operator.on_kill()
    assert Client.calls[-1] == "cancel j1"
