"""Commands and connections in a running job, against a real mesh with real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.end_to_end import remains
from tests.end_to_end.commands import COTENANT, SECONDS_MAX, Cli
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.scripts import shell
from tests.end_to_end.typed import Typed
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

CONNECTIONS = 20
ECHO = """
import os, socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    request_queue_size = 64
    daemon_threads = True
server = Server(("127.0.0.1", 0), Echo)
print(server.server_address[1], flush=True)
os.environ["ONLY_HERE"] = "no"
server.serve_forever()
"""


@pytest.fixture(scope="module")
def job(mesh: Mesh) -> str:
    """A job that serves an echo; its port is its first line of output."""
    made = mesh.cli.submit("--gpus", "1", "--cpus", "1", "--env", "ONLY_HERE=yes", "--", sys.executable, "-c", ECHO)
    mesh.client.wait_for(made, Phase.RUNNING)
    return made


@pytest.fixture(scope="module")
def port(mesh: Mesh, job: str) -> int:
    return int(until(lambda: mesh.cli("logs", job).out, "the port of the echo"))


@pytest.fixture
def terminal(cli: Cli, job: str) -> Typed:
    typed = Typed(cli, "exec", "-it", job, "--", "sh")
    typed.type("PS1='ready''> '\r")
    typed.expect("ready> ")
    return typed


def pids_with(mark: str) -> list[int]:
    """Return the processes with a word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += [int(entry.name)] if mark.encode() in (entry / "environ").read_bytes() else []
            except OSError:
                continue
    return found


def test_a_command_has_the_group_and_the_environment_of_the_job(cli: Cli, job: str) -> None:
    script = "cat /proc/self/cgroup; echo $ONLY_HERE $COTENANT_JOB_ID; pwd; echo to stderr >&2"
    ended = cli("exec", job, *shell(script))
    lines = ended.out.splitlines()
    assert lines[-2:] == [f"yes {job}", str(cli.folder)]
    assert ended.err == "to stderr\n"
    if remains.groups_of([job]):
        assert any(f"{job}-1/task-0" in line for line in lines)
    audit = cli("audit", "--json").out
    (line,) = [one for one in json.loads(audit) if one["what"] == "OpenSession" and one["on"].get("id") == job][:1]
    assert line["on"]["command"].startswith("sh -c cat")
    assert line["who"]


def test_the_exit_code_is_that_of_the_command(cli: Cli, job: str) -> None:
    assert cli("exec", job, *shell("exit 7"), code=7).err == ""
    assert cli("exec", job, *shell("kill -TERM $$"), code=143).err == ""
    assert cli("exec", job, "--", "no-such-program", code=1).error == "error: command not found: no-such-program"
    assert "rank: is 4, but" in cli("exec", job, "--rank", "4", "--", "true", code=2).err


def test_binary_input_comes_back_unchanged(cli: Cli, job: str) -> None:
    sent = random.Random(1).randbytes(3_000_000)
    done = subprocess.run(
        [COTENANT, "exec", job, "--", "cat"], input=sent, env=cli.environment, capture_output=True, check=True
    )
    assert done.stdout == sent


def test_a_terminal_has_a_size_that_may_change_and_is_restored(terminal: Typed) -> None:
    terminal.type("stty size; echo $TERM; tty\r")
    for words in ("31 97", "vt100", "/dev/pts/"):
        terminal.expect(words)
    terminal.resize(45, 120)
    terminal.type("until [ \"$(stty size)\" = '45 120' ]; do :; done; echo re''sized\r")
    terminal.expect("resized")
    terminal.expect("ready> ")
    terminal.type("cat\rtwice\r")
    terminal.expect("twice\r\ntwice")  # typed, and from cat
    terminal.type("\x03")  # ends cat, not the session
    terminal.expect("ready> ")
    terminal.type("exit 9\r")
    terminal.expect("exit 9")
    assert terminal.wait() == 9


def test_a_killed_client_leaves_no_process_in_the_job(cli: Cli, job: str) -> None:
    script = "sleep 1000 & (setsid sleep 1000 &); sleep 1000"
    client = subprocess.Popen(
        [COTENANT, "exec", job, "--", "env", "SESSION_MARK=killed", *shell(script)[1:]],
        env=cli.environment,
        stdin=subprocess.DEVNULL,
    )
    until(lambda: len(pids_with("SESSION_MARK=killed")) >= 4, "the processes of the session")
    client.kill()
    client.wait()
    until(lambda: not pids_with("SESSION_MARK=killed"), "the end of the session's processes")
    assert cli.json("show", job)["phase"] == "running"


def test_what_a_command_leaves_behind_ends_with_it(cli: Cli, job: str) -> None:
    cli("exec", job, "--", "env", "SESSION_MARK=left", *shell("(setsid sleep 1000 &); exit 0")[1:])
    assert pids_with("SESSION_MARK=left") == []


def test_other_tenants_and_viewers_have_no_sessions(cli: Cli, job: str) -> None:
    def token(name: str, *more: str) -> str:
        return cli("tokens", "create", "--name", name, *more).out.split()[-1]

    cli("tenants", "create", "others")
    eve, eye = token("eve", "--tenant", "others"), token("eye", "--role", "viewer", "--tenant", "default")
    for command in (("exec", job, "--", "true"), ("forward", job, "1:0")):
        assert "not found" in cli(*command, code=2, COTENANT_TOKEN=eve).error
    assert "may not call OpenSession" in cli("exec", job, "--", "true", code=1, COTENANT_TOKEN=eye).error


def test_a_job_that_does_not_run_is_named_with_its_state(cli: Cli, mesh: Mesh) -> None:
    ended = cli.submit("--cpus", "1", "--", "true")
    mesh.client.wait_for(ended, Phase.SUCCEEDED)
    held = cli.submit("--hold", "--cpus", "1", "--", "true")
    for job_id, how in ((ended, "has ended: it succeeded"), (held, "is not running: it is suspended")):
        assert f"job {job_id} {how}" in cli("exec", job_id, "--", "true", code=1).error


def test_a_session_ends_with_its_job(cli: Cli, mesh: Mesh) -> None:
    short = cli.submit("--cpus", "1", "--", "sleep", "1000")
    mesh.client.wait_for(short, Phase.RUNNING)
    client = subprocess.Popen(
        [COTENANT, "exec", short, "--", "env", "SESSION_MARK=ends", "sleep", "1000"],
        env=cli.environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: pids_with("SESSION_MARK=ends"), "the session")
    cli("cancel", short)
    _, said = client.communicate(timeout=SECONDS_MAX)
    assert (client.returncode, said) == (1, "error: the job has ended, and the session with it\n")
    assert pids_with("SESSION_MARK=ends") == []


@pytest.fixture
def forwarded(cli: Cli, job: str, port: int, tmp_path: Path) -> Iterator[int]:
    """The local port of a forward to the echo."""
    forward = cli.start("forward", job, f"{port}:0", log=tmp_path / "forward.log")
    line = forward.wait_for_output(f"-> {job}:{port}")
    yield int(line.partition(" ")[0].rpartition(":")[2])
    assert not forward.ended(), forward.said
    forward.terminate()


def echoed(port: int, seed: int) -> bool:
    sent = random.Random(seed).randbytes(100_000)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX) as connected:
        connected.sendall(sent[:1000])
        got = connected.recv(1, socket.MSG_PEEK)
        barrier_reached = bool(got)
        connected.sendall(sent[1000:])
        connected.shutdown(socket.SHUT_WR)
        pieces = []
        while piece := connected.recv(65536):
            pieces.append(piece)
    return barrier_reached and b"".join(pieces) == sent


def test_many_connections_are_forwarded_at_once(forwarded: int) -> None:
    with ThreadPoolExecutor(CONNECTIONS) as several:
        assert list(several.map(lambda seed: echoed(forwarded, seed), range(CONNECTIONS))) == [True] * CONNECTIONS


def test_a_forward_without_connections_ends_with_its_job(cli: Cli, tmp_path: Path) -> None:
    job = cli.submit("--cpus", "1", "--", "sleep", "1000")
    forward = cli.start("forward", job, "8888:0", log=tmp_path / "forward.log")
    forward.wait_for_output("->")
    cli("cancel", job)
    until(forward.ended, "the end")
    assert f"job {job} has ended: it was cancelled" in forward.said
    assert f"job {job} has ended: it was cancelled" in cli("forward", job, "8888:0", code=1).err


def test_a_closed_port_is_named_and_the_forward_goes_on(cli: Cli, job: str, tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, but nothing listens
        closed = bound.getsockname()[1]
        forward = cli.start("forward", job, f"{closed}:0", log=tmp_path / "forward.log")
        local = int(forward.wait_for_output("->").partition(" ")[0].rpartition(":")[2])
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", local), timeout=SECONDS_MAX) as connected:
                assert connected.recv(1) == b""
        until(lambda: forward.said.count(f"nothing listens on port {closed} in job {job}") == 2, "the refusals")
        forward.terminate()


@pytest.mark.deep
def test_a_killed_agent_ends_the_session_and_not_the_job(cli: Cli, mesh: Mesh, job: str) -> None:
    client = subprocess.Popen(
        [COTENANT, "exec", job, "--", "env", "SESSION_MARK=agent", *shell("(setsid sleep 1000 &); sleep 1000")[1:]],
        env=cli.environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: len(pids_with("SESSION_MARK=agent")) >= 3, "the session")
    processes = remains.processes_of(mesh.directory)
    (agent,) = [pid for pid, command in processes.items() if "-m cotenant.node_agent " in command]
    os.kill(agent, signal.SIGKILL)
    _, said = client.communicate(timeout=SECONDS_MAX)
    assert client.returncode == 3
    assert "is disconnected, which ends the session; the job goes on" in said
    until(lambda: not pids_with("SESSION_MARK=agent"), "the end of the session's processes")
    until(lambda: [node["state"] for node in cli.json("nodes")] == ["ready"], "the node being back")
    assert cli("exec", job, *shell("echo again")).out == "again\n"
    assert mesh.client.job(job).attempt.number == 1
