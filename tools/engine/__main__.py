"""Builds the images and runs deploy/compose.yaml with Podman: `make test-images`, as root on Debian.

Everything runs in its own namespaces (see `sandbox`), with packages of this distribution and podman-compose from PyPI.
Third-party images are left out: collector, Prometheus, Tempo and Grafana. The test then follows docs/deploying.md: it
submits a job through TLS, restarts an agent under a running job, kills the queue's leader and stops a member of etcd.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from tools.engine import images
from tools.vm.host import Unable, have, run

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cotenant-images"
SANDBOX = Path(__file__).with_name("sandbox")
INSIDE = "COTENANT_IN_SANDBOX"
COMPOSE = "podman-compose==1.6.0"
TOOLS = {
    "podman": "podman",
    "runc": "runc",
    "crun": "crun",
    "tini": "tini",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "iptables": "iptables",
}
NOT_PROGRAMS = ("netavark", "aardvark-dns")  # packages whose programs are not on the PATH
NOT_OURS = {"otel-collector", "prometheus", "tempo", "grafana"}
COTENANT = Path(sys.executable).with_name("cotenant")
WAIT_SECONDS_MAX = 90.0
FILES = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
COUNT = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i; sleep 0.2; done"


class Project:
    """The project of compose.yaml, and an operator's command line."""

    def __init__(self, directory: Path, environment: dict[str, str], compose: Path) -> None:
        self.directory, self.environment, self.compose = directory, environment, compose
        services = yaml.safe_load((directory / "compose.yaml").read_text())["services"]
        self.services = [name for name in services if name not in NOT_OURS]
        parts = ("queue", "placement", "predictor", "contention")
        endpoints = ",".join(f"{part}=127.0.0.1:{7070 + n}|127.0.0.1:{8070 + n}" for n, part in enumerate(parts))
        secrets = directory / "secrets" / "operator"
        self.operator = {
            **environment,
            "COTENANT_ENDPOINT": endpoints,
            "COTENANT_STATE_DIR": str(directory / "state"),
            **{f"COTENANT_TLS_{name}": str(secrets / file) for name, file in FILES.items()},
        }

    def run_compose(self, *words: str) -> None:
        """Run podman-compose in the network namespace of the containers."""
        self._run_in_network(
            [str(self.compose), "-f", str(self.directory / "compose.yaml"), *words], self.environment, 300
        )

    def podman(self, *words: str) -> str:
        """Run podman in that namespace and return its output."""
        return self._run_in_network(["podman", *words], self.environment, 120)

    def run(self, *words: str) -> str:
        """Run an operator's command and return its output."""
        return self._run_in_network([str(COTENANT), *words], self.operator, WAIT_SECONDS_MAX)

    def _run_in_network(self, words: list[str], environment: dict[str, str], seconds_max: float) -> str:
        done = subprocess.run(
            ["nsenter", "--net=/run/netns/containers", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds_max,
            check=False,
        )
        if done.returncode:
            raise Unable(f"{' '.join(words)} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    def kill(self, service: str) -> None:
        """Kill the main process of a container; the engine must restart it."""
        pid = self.podman("inspect", f"cotenant_{service}_1", "--format", "{{.State.Pid}}")
        os.kill(int(pid), signal.SIGKILL)

    def print_logs(self) -> None:
        """Print the end of each container's log."""
        for service in self.services:
            print(f"── {service}", file=sys.stderr, flush=True)
            words = ["podman", "logs", "--tail", "20", f"cotenant_{service}_1"]
            subprocess.run(words, env=self.environment, stdout=sys.stderr, timeout=30, check=False)


def main() -> int:
    """Run the test and return the exit status."""
    try:
        if os.geteuid() != 0:
            raise Unable("containers with their own control groups need root; run: sudo make test-images")
        if INSIDE not in os.environ:
            have(TOOLS, "run containers")
            have({f"/usr/lib/podman/{name}": name for name in NOT_PROGRAMS}, "connect containers")
            words = [str(SANDBOX), f"cotenant-images-{os.getpid()}", sys.executable, "-m", "tools.engine"]
            return subprocess.run(words, env={**os.environ, INSIDE: "1"}, check=False).returncode
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="cotenant-images-") as place:
            _try(Path(place))
    except (Unable, subprocess.TimeoutExpired) as error:
        print(f"test-images: error: {error}", file=sys.stderr)
        return 2
    return 0


def _try(place: Path) -> None:
    environment = images.configure(place)
    images.build(CACHE, environment)
    deploy = place / "deploy"
    shutil.copytree(images.ROOT / "deploy", deploy, ignore=shutil.ignore_patterns("secrets"))
    variables = {**os.environ, "COTENANT": str(COTENANT)}
    subprocess.run(["sh", deploy / "secrets.sh", deploy / "secrets", "this-machine"], env=variables, check=True)
    for service in ("queue", "placement", "predictor", "contention"):
        run("chown", "-R", "7070", deploy / "secrets" / service)
    project = Project(deploy, environment, _compose())
    print("── compose.yaml", flush=True)
    project.run_compose("up", "-d", *project.services)
    try:
        operate(project)
    except Unable:
        project.print_logs()
        raise
    finally:
        project.run_compose("down", "-v")
        if os.path.ismount(place / "storage" / "overlay"):
            run("umount", "--lazy", "--recursive", place / "storage" / "overlay")


def _compose() -> Path:
    program = CACHE / COMPOSE / "bin" / "podman-compose"
    if not program.exists():
        run(sys.executable, "-m", "venv", CACHE / COMPOSE)
        run(CACHE / COMPOSE / "bin" / "pip", "install", "--quiet", COMPOSE)
    return program


def operate(project: Project) -> None:
    """Check what docs/deploying.md promises about containers."""
    until("the node is ready", lambda: '"ready"' in project.run("nodes", "--json").lower())
    project.run("health")
    print(project.run("replicas"), flush=True)
    output = project.run("submit", "--cpus", "1", "--wait", "--", "id", "-un").split()
    _expect("nobody" in output, f"a job runs as nobody, not as {output}")

    job = project.run("submit", "--cpus", "1", "--", "sh", "-c", COUNT).split()[-1]
    until("the job counts", lambda: len(_counted(project, job)) > 3)
    before = len(_counted(project, job))
    project.podman("restart", "cotenant_agent_1")
    until("the job continues counting", lambda: len(_counted(project, job)) > before)
    print("   the agent's container was restarted; its job continued", flush=True)

    leader = next(queue for queue in _queues(project) if queue["state"] == "leads")["address"].partition(":")[0]
    project.kill(leader)
    begin = time.monotonic()
    project.run("submit", "--cpus", "1", "--wait", "--", "true")
    print(f"   {leader} was killed; a job was accepted and done after {time.monotonic() - begin:.1f} s", flush=True)
    until(f"{leader} is back", lambda: sorted(queue["state"] for queue in _queues(project)) == ["follows", "leads"])

    project.podman("stop", "cotenant_etcd-2_1")
    project.run("submit", "--cpus", "1", "--wait", "--", "true")
    project.podman("start", "cotenant_etcd-2_1")
    print("   a job ran without one member of etcd", flush=True)

    attempt = json.loads(project.run("show", job, "--json"))["attempt"]["number"]
    _expect(attempt == 1, f"the job is in its first attempt, not in number {attempt}")
    counted = _counted(project, job)
    _expect(counted == list(range(1, len(counted) + 1)), f"each number is counted once, in order: {counted}")
    project.run("cancel", job)
    until("the job has ended", lambda: json.loads(project.run("show", job, "--json"))["phase"] == "cancelled")


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; a failing command counts as not yet."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            if holds():
                return
        except Unable:
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise Unable(f"timed out after {WAIT_SECONDS_MAX:.0f} s: {what}")
        time.sleep(0.5)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Unable(f"expected: {what}")


def _counted(project: Project, job: str) -> list[int]:
    return [int(line) for line in project.run("logs", job).split() if line.isdigit()]


def _queues(project: Project) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(project.run("replicas", "--json"))
    return [replica for replica in found if replica["service"] == "queue"]


if __name__ == "__main__":
    raise SystemExit(main())
