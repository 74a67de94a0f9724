from __future__ import annotations

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.outcome import ExitCode


def test_each_service_is_checked(shell: Shell, standin: Standin) -> None:
    ended = shell("health", "--json")
    assert [one["service"] for one in ended.json] == ["queue", "placement", "predictor", "contention"]
    assert {one["address"] for one in ended.json} == {standin.address}
    states = {one["service"]: one["state"] for one in ended.json}
    assert states == {
        "queue": "serving",
        "contention": "serving",
        "placement": "not there",
        "predictor": "not there",
    }
    assert ended.code == ExitCode.FAILED


def test_health_needs_no_token(shell: Shell, standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTENANT_TOKEN")
    monkeypatch.delenv("COTENANT_ENDPOINT")
    ended = shell("health", standin.address)
    assert ended.code == ExitCode.DONE
    assert "serving" in ended.out


def test_an_unreachable_service_is_away(shell: Shell) -> None:
    ended = shell("health", "127.0.0.1:1")
    assert ended.code == ExitCode.UNREACHABLE
    assert "away" in ended.out
    assert shell("health", "--alive", "127.0.0.1:1").code == ExitCode.UNREACHABLE


def test_a_service_that_answers_but_cannot_work_is_alive(shell: Shell, standin: Standin) -> None:
    standin.set_serving("cotenant.v1.JobService", False)
    assert shell("health", standin.address).code == ExitCode.FAILED
    assert shell("health", "--alive", standin.address).code == ExitCode.DONE


def test_an_invalid_address_is_bad_usage(shell: Shell) -> None:
    ended = shell("health", "nowhere")
    assert ended.code == ExitCode.USAGE
    assert "write host:port" in ended.err


def test_unreachable_replicas_are_named(shell: Shell, standin: Standin) -> None:
    both = f"queue={standin.address}|127.0.0.1:1"
    (queue,) = shell("--endpoint", both, "health", "--json").json
    assert (queue["state"], queue["why"]) == ("serving", "127.0.0.1:1 is away")
    assert shell("--endpoint", both, "health").code == ExitCode.DONE
    standin.set_serving("cotenant.v1.JobService", False)
    assert shell("--endpoint", both, "health").code != ExitCode.DONE
