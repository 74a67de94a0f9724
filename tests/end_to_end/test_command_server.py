"""Commands that are forked behave as if they had been started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.end_to_end.command_server import CommandServer
from tests.end_to_end.commands import COTENANT, Serving
from tests.end_to_end.waiting import until

SERVER = CommandServer(COTENANT, ())


def test_a_command_has_its_own_arguments_environment_folder_streams_and_status(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "COTENANT_FORMAT": "wrong"}
    ended = SERVER.run(["version", "--nothing"], environment=environment, folder=tmp_path, stdin="", seconds=60)
    plain = subprocess.run(
        [COTENANT, "version", "--nothing"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ended.returncode == 2


def test_a_command_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    with pytest.raises(subprocess.TimeoutExpired):
        SERVER.run(["completion", "bash"], environment=environment, folder=tmp_path, stdin="", seconds=0)


def test_a_serving_process_is_told_of_signals_and_its_end_is_seen(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "COTENANT_SHARE_MACHINE": "1"}

    def start(*words: str) -> Serving:
        with open(os.devnull, "rb") as nothing:
            serving = Serving(
                lambda output: SERVER.start(
                    words, environment=environment, folder=tmp_path, streams=(nothing, output, output)
                ),
                environment,
                tmp_path / "log",
            )
        request.addfinalizer(serving.kill)
        return serving

    serving = start("up", "--gpus", "fake:1", "--listen", "127.0.0.1:0")
    serving.wait_for_output("the mesh is up")
    assert not serving.ended()
    serving.freeze()
    until(lambda: Path(f"/proc/{serving.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
    serving.thaw()
    assert serving.terminate() == 0
    assert serving.ended()
    refused = start("up", "--gpus", "many")
    assert refused.wait() == 2
    assert "invalid GPUs: 'many'" in refused.said
    again = start("up", "--gpus", "fake:1", "--listen", "127.0.0.1:0")
    again.kill()
    assert again.wait() == -signal.SIGKILL
