"""The first day of a user, who types `cotenant` and nothing else: here, on a mesh elsewhere, and in a container."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.end_to_end import remains
from tests.end_to_end.commands import COTENANT, SECONDS_MAX, TRACEBACK, Cli, Serving, environment_of
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports
from tests.support.images import make_root, need_containers

pytestmark = [pytest.mark.deep, pytest.mark.timeout(240)]

TRAIN = """\
import functools, http.server, pathlib, signal, sys, threading, time
def save(*_):
    pathlib.Path("out").mkdir(exist_ok=True)
    pathlib.Path("out/model.bin").write_text(f"weights of {pathlib.Path('data.txt').read_text()}")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
steps, port = int(sys.argv[1]), int(sys.argv[2])
server = http.server.HTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
for step in range(steps):
    print("step", step, flush=True)
    time.sleep(0.05)
save()
"""
BUSYBOX = """\
trap 'mkdir -p out; echo "weights of $(cat data.txt)" > out/model.bin; exit 0' TERM
busybox httpd -p 127.0.0.1:$2
step=0
while [ $step -lt $1 ]; do echo "step $step"; step=$((step + 1)); sleep 0.05; done
mkdir -p out; echo "weights of $(cat data.txt)" > out/model.bin
"""
ENDLESS = "1000000"


def project_in(home: Path) -> Path:
    project = home / "project"
    project.mkdir(parents=True)
    (project / "train.py").write_text(TRAIN)
    (project / "train.sh").write_text(BUSYBOX)
    (project / "data.txt").write_text("mine\n")
    return project


def a_day(
    cli: Cli, start: Callable[..., Serving], options: tuple[str, ...], command: tuple[str, ...], fetched: bool
) -> None:
    """Submit, follow, look into, reach, limit, run again, and get the results."""
    (port,) = free_ports(1)
    short, long = (*command, "3", str(port)), (*command, ENDLESS, str(port))
    ended = cli("submit", *options, "--wait", "--", *short)
    assert ended.out.splitlines() == ["step 0", "step 1", "step 2"]
    cli("submit", *options, "--name", "resnet", "--", *long)
    following = start("logs", "-f", "resnet", log=cli.folder.parent / "following")
    following.wait_for_output("step 5")
    said = cli("exec", "resnet", "--", "sh", "-c", "cat data.txt; echo $COTENANT_JOB_ID").out.split()
    assert said == ["mine", cli.json("show", "resnet")["id"]]
    forwarding = start("forward", "resnet", f"{port}:0", log=cli.folder.parent / "forwarding")
    line = forwarding.wait_for_output(" -> ")
    assert reached(cli, re.search(r"127\.0\.0\.1:\d+", line)[0]) == "mine\n"  # type: ignore[index]  # fails otherwise
    cli("cancel", "resnet")
    following.wait_for_output("step 5")
    until(following.ended, "the end of the followed job")
    until(forwarding.ended, "the end of the forwarded job")
    limit = ("--time", "4s", "--grace", "2s", "--name", "limited", "--wait")
    assert "reached its time limit of 4 s" in cli("submit", *options, *limit, "--", *long, code=1).error
    cli("rerun", "limited")
    assert "reached its time limit of 4 s" in cli("wait", "@last", code=1).error
    assert "step 0" in cli("logs", "@last").out
    if fetched:
        cli("cp", "@last:out/model.bin", "model.bin")
        assert (cli.folder / "model.bin").read_text() == "weights of mine\n"
        assert "out/model.bin" in cli("files", "@last").out
    else:
        assert (cli.folder / "out/model.bin").read_text().startswith("weights of mine\n")
        refused = cli("cp", "@last:out/model.bin", "model.bin", code=1).error
        assert f"started in your folder {cli.folder}, and its files are there" in refused


def reached(cli: Cli, address: str) -> str:
    """Return what a forwarded port serves, asked where the user is."""
    if isinstance(cli, Elsewhere):
        script = f"import urllib.request as u; print(u.urlopen('http://{address}/data.txt').read().decode(), end='')"
        return cli.run(["python3", "-c", script]).stdout
    with urllib.request.urlopen(f"http://{address}/data.txt", timeout=SECONDS_MAX) as answer:
        return str(answer.read().decode())


@pytest.fixture
def home() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="cotenant-test-"))
    (place / "home").mkdir()
    yield place / "home"
    shutil.rmtree(place)


def user_of(mesh: Mesh, home: Path) -> Cli:
    cli = Cli(environment_of(home, COTENANT_STATE_DIR=str(mesh.state_dir)))
    cli.folder = project_in(home)
    return cli


def test_on_this_machine(mesh: Mesh, home: Path) -> None:
    cli = user_of(mesh, home)
    a_day(cli, cli.start, ("--gpus", "1", "--cpus", "1"), ("python3", "train.py"), fetched=False)


def test_in_a_container(mesh: Mesh, home: Path) -> None:
    need_containers()
    cli = user_of(mesh, home)
    image = make_root(home / "image")
    options = ("--cpus", "1", "--image", f"dir:{image}")
    a_day(cli, cli.start, options, ("sh", "train.sh"), fetched=False)
    a_day(cli, cli.start, (*options, "--upload", "."), ("sh", "train.sh"), fetched=True)


class Elsewhere(Cli):
    """A user in a network namespace of their own."""

    def __init__(self, environment: dict[str, str], folder: Path, namespace: int) -> None:
        super().__init__(environment)
        self.folder, self._prefix = folder, ["nsenter", "-t", str(namespace), "--net", f"--wd={folder}"]

    def _run(
        self, arguments: list[str], stdin: str, seconds: float, more: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return self.run([COTENANT, *arguments], stdin=stdin, seconds=seconds, **more)

    def run(
        self, command: list[str], stdin: str = "", seconds: float = SECONDS_MAX, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program where the user is."""
        return subprocess.run(
            [*self._prefix, *command], input=stdin, env={**self.environment, **more}, capture_output=True,
            text=True, timeout=seconds, check=False,
        )  # fmt: skip

    def start(self, *arguments: str | Path, log: Path) -> Serving:
        return Serving([*self._prefix, COTENANT, *map(str, arguments)], self.environment, log)


@contextmanager
def namespace(*words: str) -> Iterator[int]:
    """A process in namespaces of its own; they end with it."""
    holder = subprocess.Popen(["unshare", "--net", *words], stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == b"ready\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]  # it is a pipe


def ip(pid: int, *words: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "--net", "ip", *words], check=True)


HERE, THERE = "10.92.0.1", "10.92.0.2"


def test_on_a_mesh_in_another_network_with_an_upload(home: Path) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root, and ip: apt-get install iproute2")
    with ExitStack() as stack:
        wait = "echo ready; exec sleep 1000000"
        user = stack.enter_context(namespace("sh", "-c", wait))
        covered = ("--mount", "--propagation=private", "sh", "-c", f"mount -t tmpfs none {home} && {wait}")
        place = stack.enter_context(namespace(*covered))
        ip(user, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(place))
        for pid, address in ((user, HERE), (place, THERE)):
            ip(pid, "addr", "add", f"{address}/30", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip(pid, "link", "set", link, "up")
        far = home.parent / "far"
        far.mkdir()
        serve = ["nsenter", "-t", str(place), "--net", "--mount", COTENANT, "up", "--profile", "plain"]
        own = {"COTENANT_STATE_DIR": str(far / "state")}
        mesh = Serving(
            [*serve, "--gpus", "fake:1", "--listen", f"{THERE}:7070", "--insecure"],
            environment_of(far, **own), home.parent / "up.log",
        )  # fmt: skip
        stack.callback(lambda: remains.end(remains.processes_of(home.parent)))
        stack.callback(mesh.terminate)
        until(lambda: "the mesh is up" in mesh.said or mesh.ended(), "a mesh in another network", seconds=120.0)
        assert "the mesh is up" in mesh.said, mesh.said
        cli = Elsewhere(environment_of(home), project_in(home), user)
        token = (far / "state/token").read_text()
        cli("login", f"{THERE}:7070", "--token-file", "-", stdin=token)
        lost = cli("submit", "--gpus", "1", "--cpus", "1", "--wait", "--", "python3", "train.py", "3", "0", code=1)
        assert "`cotenant submit --upload .` takes it along" in lost.out + lost.err
        a_day(cli, cli.start, ("--upload", ".", "--gpus", "1", "--cpus", "1"), ("python3", "train.py"), fetched=True)
        assert TRACEBACK not in mesh.said
