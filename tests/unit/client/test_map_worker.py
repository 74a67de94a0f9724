"""The program of a map's workers: claims, recovery, and what it refuses."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from cotenant.client import map_worker
from cotenant.client.map_worker import (
    HEADER,
    RAISED,
    RETURNED,
    TOO_LARGE,
    claim,
    claims_of,
    main,
    records,
    results_name,
)

Prepare = Callable[..., Path]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    def write(function: Callable[..., Any], *items: Any, **plan: Any) -> Path:
        (tmp_path / map_worker.CLAIMS).mkdir()
        (tmp_path / map_worker.ALIVE).touch()
        (tmp_path / map_worker.FUNCTION).write_bytes(cloudpickle.dumps(function))
        calls = [cloudpickle.dumps(((item,), {})) for item in items]
        (tmp_path / map_worker.ITEMS).write_bytes(b"".join(calls))
        ends = [sum(map(len, calls[: number + 1])) for number in range(len(calls))]
        defaults = {"python": sys.version_info[:2], "path": [], "result_bytes_max": 1000, "lease_seconds": 0}
        (tmp_path / map_worker.PLAN).write_text(json.dumps({"ends": ends, **defaults, **plan}))
        return tmp_path

    return write


def results(folder: Path, worker: int) -> dict[int, tuple[int, Any]]:
    data = (folder / results_name(worker)).read_bytes()
    return {item: (kind, pickle.loads(pickled)) for item, kind, pickled, _ in records(data)}


def test_it_computes_every_item_that_nobody_has_claimed(prepare: Prepare) -> None:
    folder = prepare(lambda x: x * 10, 1, 2, 3)
    assert claim(folder, 1, 7)
    assert not claim(folder, 1, 8)
    assert main(folder, 0) == 0
    assert results(folder, 0) == {0: (RETURNED, 10), 2: (RETURNED, 30)}
    assert sorted(claims_of(folder, 0)) == [0, 2]


def test_a_restarted_worker_finishes_its_claims_and_drops_a_partial_record(prepare: Prepare) -> None:
    folder = prepare(lambda x: x * 10, 1, 2, 3)
    for item in (0, 1):
        claim(folder, item, 0)
    done = pickle.dumps("kept")
    (folder / results_name(0)).write_bytes(HEADER.pack(0, RETURNED, len(done)) + done + HEADER.pack(1, RETURNED, 99))
    assert main(folder, 0) == 0
    assert results(folder, 0) == {0: (RETURNED, "kept"), 1: (RETURNED, 20), 2: (RETURNED, 30)}


def test_an_exception_keeps_its_type_and_its_traceback(prepare: Prepare) -> None:
    def fail(x: int) -> None:
        raise KeyError(x)

    folder = prepare(fail, 5)
    main(folder, 0)
    [(kind, (error, name, text, shown))] = results(folder, 0).values()
    assert (kind, type(error), error.args, name, text) == (RAISED, KeyError, (5,), "KeyError", "5")
    assert "in fail" in shown


def test_an_exception_that_cannot_be_pickled_is_text(prepare: Prepare) -> None:
    def fail(x: int) -> None:
        raise ValueError(sys._getframe())

    folder = prepare(fail, 5)
    main(folder, 0)
    [(kind, (error, name, _, _))] = results(folder, 0).values()
    assert (kind, error, name) == (RAISED, None, "ValueError")


def test_a_result_above_the_limit_is_not_passed_on(prepare: Prepare) -> None:
    folder = prepare(lambda x: b"x" * x, 5, 2000)
    main(folder, 0)
    found = results(folder, 0)
    assert found[0] == (RETURNED, b"xxxxx")
    kind, (item, size, most) = found[1]
    assert (kind, item, most, size > 2000) == (TOO_LARGE, 1, 1000, True)


def test_it_takes_nothing_once_the_submitter_is_gone(prepare: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(lambda x: x, 1, lease_seconds=60)
    os.utime(folder / map_worker.ALIVE, (0, 0))
    assert main(folder, 0) == 0
    assert results(folder, 0) == {}
    assert "is gone" in capsys.readouterr().out


def test_it_refuses_another_version_of_python(prepare: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(lambda x: x, 1, python=[3, 1])
    assert main(folder, 0) == map_worker.OTHER_PYTHON
    assert "pickled by Python 3.1, and this node runs it with Python 3." in capsys.readouterr().out
