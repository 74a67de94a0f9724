from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.cli import main
from cotenant.core.model.job import JobSpec, Request, Role

COTENANT = [sys.executable, "-c", "from cotenant.cli.main import main; main()"]


@dataclass(frozen=True)
class Ended:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    """Runs commands in this process, as `cotenant …` would."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> Ended:
        self._capture.readouterr()
        code = main.run(arguments)
        out, err = self._capture.readouterr()
        assert "Traceback" not in err
        return Ended(code, out, err)


@pytest.fixture(autouse=True)
def no_logs() -> Iterator[None]:
    """Log nothing: a stand-in mesh runs in this process, and its log would be part of a command's output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory for the test, isolated from this machine's files."""
    for name in ("COTENANT_ENDPOINT", "COTENANT_TOKEN", "COTENANT_STATE_DIR", "COTENANT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standin]:
    """A mesh that the environment variables point to."""
    made = Standin()
    made.start()
    monkeypatch.setenv("COTENANT_ENDPOINT", made.address)
    monkeypatch.setenv("COTENANT_TOKEN", TOKEN)
    yield made
    made.stop()


@pytest.fixture
def spec() -> JobSpec:
    """A job with one GPU."""
    roles = (Role(request=Request(gpu_milli=1000, cores=4)),)
    return JobSpec(name="resnet", roles=roles, command=("python3", "train.py"), labels=(("project", "vision"),))


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Resume interrupted streams without delay."""

    def quicken() -> None:
        monkeypatch.setattr("cotenant.cli.stream_retry.RETRY_DELAYS_SECONDS", (0.0,) * 10)

    return quicken
