"""The example executor of the docs on a live mesh: jobs succeed, fail and are cancelled there; its limits are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.commands import Cli
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "executor.py"
NODE = "lab-7"


@pytest.fixture(scope="module")
def executor(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example as a node of its own; the node of the mesh itself takes no jobs."""
    folder = tmp_path_factory.mktemp("executor")
    token = (mesh.state_dir / "token").read_text().strip()
    environment = {**os.environ, "COTENANT_ENDPOINT": mesh.address, "COTENANT_TOKEN": token}
    [own] = json.loads(mesh.cli("nodes", "--json").out)
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(EXAMPLE), NODE, str(folder / "memory.json")]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        mesh.cli("cordon", own["id"])
        until(lambda: NODE in mesh.cli("nodes").out, "the executor's node")
        yield
    finally:
        mesh.cli("uncordon", own["id"])
        process.terminate()
        process.wait()


def phase(cli: Cli, job_id: str) -> str:
    return str(json.loads(cli("show", job_id, "--json").out)["phase"])


def submit(cli: Cli, *command: str) -> str:
    return cli("submit", "--cpus", "1", "--", *command).out.split()[0]


def test_jobs_on_a_node_of_another_executor_succeed_fail_and_are_cancelled(executor: None, cli: Cli) -> None:
    good, bad = submit(cli, "true"), submit(cli, "sh", "-c", "exit 3")
    cli("wait", good)
    cli("wait", bad, code=1)
    assert json.loads(cli("show", bad, "--json").out)["attempt"]["exit"]["code"] == 3
    lasting = submit(cli, "sleep", "600")
    until(lambda: phase(cli, lasting) == "running", "start of the job", seconds=20.0)
    cli("cancel", lasting)
    until(lambda: phase(cli, lasting) == "cancelled", "end of the job", seconds=20.0)


def test_a_node_tells_what_its_executor_cannot_do(executor: None, cli: Cli) -> None:
    assert f"{NODE}: its executor: cores are only counted; no logs" in cli("nodes").err
    assert "cores are only counted; no logs" in cli("nodes", NODE).out
    told = json.loads(cli("nodes", NODE, "--json").out)["capabilities"]
    assert (told["cores"], told["able"]) == ("none", ["signals"])


def test_logs_and_sessions_there_are_one_clear_error(executor: None, cli: Cli) -> None:
    job_id = submit(cli, "sleep", "600")
    until(lambda: phase(cli, job_id) == "running", "start of the job", seconds=20.0)
    assert f"the executor of {NODE} keeps no output: it declares no logs" in cli("logs", job_id, code=1).error
    assert f"the executor of {NODE} carries no sessions" in cli("exec", job_id, "--", "true", code=1).error
    cli("cancel", job_id)
