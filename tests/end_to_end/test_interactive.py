"""Interactive jobs, against a real mesh with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.end_to_end import remains
from tests.end_to_end.commands import COTENANT, SECONDS_MAX, Cli
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.scripts import shell
from tests.end_to_end.typed import Typed
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

ONE_CORE = ("--cpus", "1")
JUPYTER = """#!/usr/bin/env python3
import http.server, os, sys
port = next(int(word[7:]) for word in sys.argv if word.startswith("--port="))
token = open(os.environ["JUPYTER_TOKEN_FILE"]).read()
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass
    def do_GET(self):
        self.send_response(200 if self.path.endswith("token=" + token) else 403)
        self.end_headers()
        self.wfile.write(b"the lab")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def newest(cli: Cli) -> str:
    """Return the id of the newest job."""
    return str(cli.json("show", "@last")["id"])


def phase(cli: Cli, job: str) -> str:
    return str(cli.json("show", job)["phase"])


@pytest.fixture
def terminal(cli: Cli) -> Typed:
    """A shell in a job of its own."""
    typed = Typed(cli, "run", "-it", *ONE_CORE, "--", "env", "PS1=ready> ", "sh")
    typed.expect("ready> ")
    return typed


@pytest.mark.deep
def test_without_a_terminal_output_and_exit_code_are_the_programs(cli: Cli) -> None:
    ended = cli("run", *ONE_CORE, *shell("echo $COTENANT_JOB_ID; echo to stderr >&2; cat; exit 7"), code=7)
    job = newest(cli)
    assert ended.out == f"{job}\n"
    assert "to stderr\n" in ended.err
    assert "error:" not in ended.err
    shown = cli.json("show", job)
    assert (shown["phase"], shown["attempt"]["exit"]["code"]) == ("failed", 7)
    assert re.search("^command +cotenant run -- sh -c ", cli("show", job).out, re.MULTILINE)
    assert f"{job}\nto stderr" in cli("logs", job).out


def test_input_is_passed_on_unchanged(cli: Cli) -> None:
    sent = os.urandom(1_000_000)
    done = subprocess.run(
        [COTENANT, "run", "-i", *ONE_CORE, "--", "cat"],
        input=sent, env=cli.environment, cwd=cli.folder, capture_output=True, timeout=SECONDS_MAX, check=True,
    )  # fmt: skip
    assert done.stdout == sent


def test_a_program_that_does_not_exist_is_named(cli: Cli) -> None:
    assert "no-such-program: No such file or directory" in cli("run", *ONE_CORE, "--", "no-such-program", code=127).err
    assert "-t needs a terminal" in cli("run", "-t", *ONE_CORE, "--", "sh", code=2).error
    assert "one process" in cli("run", "--replicas", "2", *ONE_CORE, "--", "sh", code=2).error
    assert "--idle" in cli("run", "--idle", "soon", *ONE_CORE, "--", "sh", code=2).error
    plain = cli.submit(*ONE_CORE, "--", "true")
    assert f"job {plain} was not started by `cotenant run`" in cli("attach", plain, code=1).error


def test_a_terminal_follows_its_window_and_its_keys(terminal: Typed) -> None:
    terminal.type("stty size; echo $TERM; tty\r")
    for words in ("31 97", "vt100", "/dev/pts/"):
        terminal.expect(words)
    terminal.resize(45, 120)
    terminal.type("until [ \"$(stty size)\" = '45 120' ]; do :; done; echo re''sized\r")
    terminal.expect("resized")
    terminal.expect("ready> ")
    terminal.type("cat\rtwice\r")
    terminal.expect("twice\r\ntwice")
    terminal.type("\x03")  # ends cat, not the job
    terminal.expect("ready> ")
    terminal.type("exit 9\r")
    terminal.expect("exit 9")
    assert terminal.wait() == 9


@pytest.mark.deep
def test_a_lost_client_is_replaced_by_the_next(cli: Cli, terminal: Typed) -> None:
    job = newest(cli)
    terminal.type("KEPT=ye''s\r")
    terminal.expect("ready> ")
    os.kill(terminal.pid, signal.SIGKILL)
    assert terminal.wait() == -signal.SIGKILL
    second = Typed(cli, "attach", job)
    second.type("echo kept=$KEPT\r")
    second.expect("kept=yes")
    third = Typed(cli, "attach", job)
    second.expect(f"another client has attached to job {job}")
    assert second.wait() == 1
    third.type("echo third=$KEPT\r")
    third.expect("third=yes")
    third.type("exit 5\r")
    third.expect("exit 5")
    assert third.wait() == 5


@pytest.mark.deep
def test_a_killed_agent_does_not_end_the_program(cli: Cli, mesh: Mesh, terminal: Typed) -> None:
    terminal.type("KEPT=ye''s\r")
    terminal.expect("ready> ")
    processes = remains.processes_of(mesh.directory)
    (agent,) = [pid for pid, command in processes.items() if "-m cotenant.node_agent " in command]
    os.kill(agent, signal.SIGKILL)
    until(lambda: [node["state"] for node in cli.json("nodes")] == ["ready"], "the node being back")
    terminal.expect("attaching again")
    terminal.type("echo kept=$KEPT\r")
    terminal.expect("kept=yes")
    terminal.type("exit 3\r")
    assert terminal.wait() == 3


def test_a_closed_terminal_ends_the_job(cli: Cli, terminal: Typed) -> None:
    job = newest(cli)
    terminal.close()
    until(lambda: phase(cli, job) == "cancelled", "the end of the job")


def test_without_a_client_the_job_ends_after_the_idle_time(cli: Cli) -> None:
    client = subprocess.Popen(
        [COTENANT, "run", "--idle", "0s", *ONE_CORE, *shell("echo begun; exec sleep 1000")],
        env=cli.environment, cwd=cli.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    job = newest(cli)
    client.kill()
    client.communicate()
    until(lambda: phase(cli, job) == "failed", "the end of the job")
    assert "no client is attached" in cli("logs", job).out


@pytest.mark.deep
def test_ctrl_c_cancels_a_program_without_input(cli: Cli) -> None:
    client = subprocess.Popen(
        [COTENANT, "run", *ONE_CORE, *shell("trap 'echo saved; exit 0' TERM; echo begun; while :; do sleep 0.1; done")],
        env=cli.environment, cwd=cli.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    client.send_signal(signal.SIGINT)
    said, _ = client.communicate(timeout=SECONDS_MAX)
    assert (said, client.returncode) == ("saved\n", 130)
    assert phase(cli, newest(cli)) == "cancelled"


def test_a_second_ctrl_c_ends_it_at_once(cli: Cli) -> None:
    client = subprocess.Popen(
        [COTENANT, "run", "--grace", "10m", *ONE_CORE, *shell("trap '' TERM; echo begun; while :; do sleep 0.1; done")],
        env=cli.environment, cwd=cli.folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stderr is not None
    assert client.stdout.readline() == "begun\n"
    client.send_signal(signal.SIGINT)
    while "again to end it at once" not in client.stderr.readline():
        continue
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=SECONDS_MAX)
    assert client.returncode == 130


def test_a_job_that_waits_says_why_and_can_be_given_up(cli: Cli, mesh: Mesh) -> None:
    blocking = cli.submit("--gpus", "4", "--cpus", "1", "--", "sleep", "1000")
    mesh.client.wait_for(blocking, Phase.RUNNING)
    waiting = Typed(cli, "run", "-it", "--gpus", "1", "--", "sh")
    waiting.expect("queued")
    waiting.type("\x03")
    waiting.expect("was cancelled")
    assert waiting.wait() == 130
    cli("cancel", blocking)


@pytest.mark.deep
def test_a_job_that_another_cancels_says_so(cli: Cli, terminal: Typed) -> None:
    job = newest(cli)
    cli("cancel", job)
    terminal.expect(f"job {job} was cancelled")
    assert terminal.wait() == 1


def test_a_notebook_is_reached_with_a_token_that_nothing_shows(cli: Cli, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "jupyter").write_text(JUPYTER)
    (programs / "jupyter").chmod(0o755)
    found = Cli({**cli.environment, "PATH": f"{programs}:{cli.environment['PATH']}"})
    serving = found.start("notebook", "--json", "--port", "0", *ONE_CORE, log=tmp_path / "notebook.log")
    said = json.loads(serving.wait_for_output("http://127.0.0.1:"))
    token = said["url"].partition("token=")[2]
    assert len(token) >= 32
    with urllib.request.urlopen(said["url"], timeout=SECONDS_MAX) as answer:
        assert answer.read() == b"the lab"
    shown = json.dumps(cli.json("show", said["id"])) + cli("logs", said["id"]).out
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert token not in shown
    assert not any(token.encode() in one for one in commands)
    assert cli("show", said["id"]).out.count("cotenant notebook") == 1
    os.kill(serving.pid, signal.SIGINT)
    assert serving.wait() == 130
    assert phase(cli, said["id"]) == "cancelled"


def test_a_notebook_without_jupyter_says_what_to_install(cli: Cli) -> None:
    ended = cli("notebook", *ONE_CORE, "--env", "PATH=/usr/bin:/bin", code=127)
    assert "jupyter is not on the PATH" in ended.err
    assert "pip install jupyterlab" in ended.err
