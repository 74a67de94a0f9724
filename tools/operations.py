"""Runs the procedures of docs/operations.md with real processes and records the page: `make operations`.

Three members of etcd, two processes of each service and five agents, all with certificates. The page shows the actual
output of the commands; only ports, directories and pids are replaced by names. The tool fails if a step does not have
the result that the page describes, and it removes everything that it started or wrote.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.end_to_end import remains  # noqa: E402 - the root of the checkout has to be on the path first
from tests.end_to_end.commands import COTENANT, Serving, environment_of  # noqa: E402 - likewise
from tests.support.etcd_server import EtcdServer, free_ports, leader_of, start_cluster  # noqa: E402 - likewise
from tools.installed_version import NEWEST, Version, installed_version  # noqa: E402 - likewise
from tools.page import Page  # noqa: E402 - likewise

PAGE = ROOT / "docs" / "operations.md"
SERVICES = ("placement", "predictor", "contention", "queue")
AGENTS = tuple(f"gpu-{number}" for number in range(1, 6))
JOBS = 30
WITNESS = "witness"
WAIT_SECONDS_MAX = 60.0

HEAD = """\
# Operating a mesh of many machines

This page is a terminal session recorded by `make operations`: the output was printed by the commands shown, with real
processes. Each process has its own address on one machine, shown here as if each had its own machine (`head-1.lab`,
`head-2.lab`, …); the five agents have two declared GPUs each and share this machine's CPUs. How services find a leader
is in [replicas](replicas.md), roles and permissions in [security](security.md), the content of the store in
[the store](backups.md), units and manifests in [deploying](deploying.md).
"""


class Mesh:
    """All processes of the mesh, and an operator's command line."""

    def __init__(self, directory: Path, page: Page, version: Version) -> None:
        self.directory, self.page = directory, page
        self.version = version  # of new processes and of the operator's command
        self.environment = environment_of(directory, COTENANT_STATE_DIR=str(directory / "operator"))
        self.etcd: list[EtcdServer] = []
        self.ports: dict[str, int] = {}
        self.processes: dict[str, Serving] = {}

    # The command line -------------------------------------------------------------------------------------

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command and return its output."""
        done = subprocess.run(
            [self.version.command, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS_MAX,
            check=False,
        )
        if done.returncode != code:
            raise SystemExit(
                f"cotenant {' '.join(words)} exited with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def show(self, *words: str, code: int = 0, shown: str = "") -> str:
        """Run a command and add it and its output to the page."""
        output = self.run(*words, code=code)
        self.page.show(shown or f"cotenant {' '.join(words)}", output)
        return output

    def jobs(self) -> list[dict[str, str]]:
        """Return all jobs of the mesh."""
        found: list[dict[str, str]] = json.loads(self.run("jobs", "--all", "--json"))
        return found

    # Processes --------------------------------------------------------------------------------------------

    def address(self, part: str) -> str:
        """Return the address of a process."""
        return f"127.0.0.1:{self.ports[part]}"

    @property
    def endpoints(self) -> str:
        """The endpoints of all services, in the format of `--endpoints`."""
        return ",".join(
            f"{service}={self.address(service + '-1')}|{self.address(service + '-2')}" for service in SERVICES
        )

    @property
    def store(self) -> str:
        """The URL of the store, with all etcd members."""
        return f"etcd://{','.join(server.endpoint for server in self.etcd)}"

    def start(self, part: str) -> None:
        """Start a service process or an agent and wait until it serves."""
        service, agent = part.rpartition("-")[0], part in AGENTS
        certs = self.directory / "certs"
        stem = f"agent-{part}" if agent else f"service-{service}"
        tls = ["--tls-ca", certs / "ca.pem", "--tls-cert", certs / f"{stem}.pem", "--tls-key", certs / f"{stem}.key"]
        words = ["--state-dir", self.directory / part, *tls, "serve", "agent" if agent else service]
        if agent:
            settings = self.directory / "agent.toml"
            settings.write_text(f'[users]\nann = "{getpass.getuser()}"\n')
            words += ["--config", settings, "--node", part, "--gpus", "fake:2", "--address", "127.0.0.1"]
        else:
            words += ["--listen", self.address(part), "--store", self.store]
        words += ["--endpoints", self.endpoints]
        log = self.directory / f"{part}.log"
        process = Serving([self.version.command, *map(str, words)], self.environment, log)
        process.wait_for_output("placement_connected" if agent else f"{service} serves at")
        self.processes[part] = process

    def restart(self, part: str) -> None:
        """Stop a process gracefully and start it again."""
        self.processes.pop(part).terminate()
        self.start(part)

    def kill(self, part: str) -> None:
        """Kill a process, as a power failure would."""
        self.processes.pop(part).kill()

    def leader(self, service: str) -> str:
        """Return the process that is the leader of a service."""
        replicas = json.loads(self.run("replicas", "--json"))
        return next(
            part
            for replica in replicas
            for part in (f"{service}-1", f"{service}-2")
            if replica["service"] == service
            and replica["state"] == "leads"
            and replica["address"] == self.address(part)
        )

    def close(self) -> None:
        """Kill all processes, also those of jobs."""
        for part in list(self.processes):
            self.kill(part)
        for server in self.etcd:
            server.kill()
        remains.end(remains.processes_of(self.directory))


def until(what: str, holds: Callable[[], bool]) -> float:
    """Wait until a condition holds; return the seconds it took."""
    begin = time.monotonic()
    while not holds():
        if time.monotonic() - begin > WAIT_SECONDS_MAX:
            raise SystemExit(f"timed out after {WAIT_SECONDS_MAX:.0f} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - begin


# The steps ------------------------------------------------------------------------------------------------


def set_up(mesh: Mesh, page: Page) -> None:
    """Create certificates and start everything."""
    page.add_text(
        "## Certificates\n\n"
        "A certificate authority on the operator's machine, and a certificate for each process and user."
    )
    certs = mesh.directory / "certs"
    page.name(certs, "/etc/cotenant/certs")
    mesh.show("certs", "init", "--dir", str(certs))
    for service in SERVICES:
        mesh.run("certs", "issue", f"service/{service}", "--dir", str(certs))
    for agent in AGENTS:
        mesh.run("certs", "issue", f"agent/{agent}", "--dir", str(certs))
    mesh.show("certs", "issue", "operator/ann", "--dir", str(certs))
    mesh.show("certs", "show", "--dir", str(certs))
    for name, file in (("CA", "ca.pem"), ("CERT", "operator-ann.pem"), ("KEY", "operator-ann.key")):
        mesh.environment[f"COTENANT_TLS_{name}"] = str(certs / file)

    page.add_text("## Three members, two of each service, five agents")
    mesh.etcd = start_cluster(mesh.directory, members=3, arguments=("--max-txn-ops=4096",))
    for number, server in enumerate(mesh.etcd, 1):
        page.name(
            server.endpoint, f"etcd-{number}.lab:2379"
        )  # as long as the real address, so that tables stay aligned
    parts = [f"{service}-{number}" for service in SERVICES for number in (1, 2)]
    mesh.ports = dict(zip(parts, free_ports(len(parts)), strict=True))
    for part in parts:
        service, _, head = part.rpartition("-")
        default = {"queue": 7070, "placement": 7071, "predictor": 7072, "contention": 7073}[service]
        page.name(mesh.address(part), f"head-{head}.lab:{default}")
    mesh.environment["COTENANT_ENDPOINT"] = mesh.endpoints
    page.show(
        "cotenant serve queue --store etcd://etcd-1.lab:2379,… --listen 0.0.0.0:7070 --endpoints … --tls-ca …   "
        "# on head-1 and head-2; the same for placement, predictor and contention",
        "",
    )
    page.show("cotenant serve agent --node gpu-1 --endpoints … --tls-ca …   # on each GPU server", "")
    page.add_text(
        "Jobs run as their submitters; an agent's settings may map submitters to users (`[users]`, as here for `ann`)."
    )
    for part in (*parts, *AGENTS):
        mesh.start(part)
    page.show(f"export COTENANT_ENDPOINT='{mesh.endpoints}'", "")
    show_status(mesh)
    mesh.show("replicas")
    mesh.show("nodes")


def lose_the_leader(mesh: Mesh, page: Page) -> None:
    """Kill the queue's leader while jobs are submitted, and check that none is lost."""
    page.add_text(
        "## The queue's leader dies while jobs are submitted\n\n"
        f"{JOBS} jobs are submitted one after another; after the tenth, the leader is killed (`kill -9`)."
    )
    done = mesh.directory / "done"
    accepted: list[str] = []
    longest = 0.0
    for number in range(JOBS):
        if number == 10:
            leads = mesh.leader("queue")
            head = leads.rpartition("-")[2]
            page.show(f"kill -9 $(systemctl show -p MainPID --value cotenant@queue)   # on head-{head}, the leader", "")
            mesh.kill(leads)
        begin = time.monotonic()
        accepted += mesh.run("submit", "--cpus", "1", "--", "sh", "-c", f"echo {number} >> {done}").split()
        longest = max(longest, time.monotonic() - begin)
    until("all jobs have succeeded", lambda: sum(job["phase"] == "succeeded" for job in mesh.jobs()) >= JOBS)
    ran = sorted(map(int, done.read_text().split()))
    known = [job["id"] for job in mesh.jobs() if job["name"] != WITNESS]
    if ran != list(range(JOBS)) or sorted(known) != sorted(accepted):
        raise SystemExit(f"jobs were lost or ran twice: accepted {accepted}, known {known}, ran {ran}")
    page.add_text(
        f"All {JOBS} were accepted; each is known once and ran once. The submission during the failover took "
        f"{longest:.1f} s, waiting for the new leader; no submission had to be repeated."
    )
    mesh.show("replicas")
    dead = next(part for part in ("queue-1", "queue-2") if part not in mesh.processes)
    mesh.start(dead)
    page.add_text("The restarted process is a follower.")


def lose_members(mesh: Mesh, page: Page, counted: Path) -> None:
    """Kill one member of etcd, then a second one, and restart them."""
    page.add_text(
        "## A member of etcd goes away, then another\n\n"
        "The loss of one member of three has no effect, even if it is etcd's leader:"
    )
    lost = [leader_of(mesh.etcd)]
    lost[0].kill()
    mesh.show("submit", "--cpus", "1", "--wait", "--", "true")
    show_status(mesh, problems=1)
    page.add_text(
        "Without a majority the store cannot acknowledge a write, so no job is accepted; running jobs continue."
    )
    lost.append(next(server for server in mesh.etcd if server not in lost))
    lost[1].kill()
    before = counted.stat().st_size
    mesh.show("submit", "--cpus", "1", "--", "true", code=3)
    until("the running job continues", lambda: counted.stat().st_size > before)
    show_status(mesh, problems=3)
    for server in lost:
        server.start()
    until("the mesh is healthy", lambda: _healthy(mesh))
    page.add_text("Both members are back:")
    show_status(mesh)


def _healthy(mesh: Mesh) -> bool:
    done = subprocess.run([COTENANT, "health"], env=mesh.environment, capture_output=True, check=False)
    return done.returncode == 0


def show_status(mesh: Mesh, problems: int = 0) -> None:
    """Show the status of the mesh once it lists this many problems; older versions list none."""
    if mesh.version != NEWEST:
        mesh.show("health")
        return

    def listed() -> bool:
        done = subprocess.run([COTENANT, "status", "--json"], env=mesh.environment, capture_output=True, check=False)
        return len(json.loads(done.stdout)["problems"]) == problems

    until(f"`cotenant status` lists {problems} problems", listed)
    mesh.show("status", code=1 if problems else 0)


def roll(mesh: Mesh, page: Page, counted: Path) -> None:
    """Restart every process, one at a time."""
    before, mesh.version = mesh.version, NEWEST
    page.add_text(
        "## An upgrade, one process after another\n\n"
        "Install the new version, then restart one process at a time, and wait until it serves: the follower before "
        "the leader, agents last. The new and the old version can communicate during the upgrade."
        + (f" Here {before.description}." if before != NEWEST else "")
    )
    for service in SERVICES:
        leads = mesh.leader(service) if service in ("queue", "placement") else f"{service}-2"
        follows = f"{service}-1" if leads.endswith("2") else f"{service}-2"
        for part in (follows, leads):
            mesh.restart(part)
            mesh.run("submit", "--gpus", "1", "--cpus", "1", "--wait", "--", "true")
    for agent in AGENTS:
        mesh.restart(agent)
        mesh.run("submit", "--gpus", "1", "--cpus", "1", "--wait", "--", "true")
    written = counted.stat().st_size
    until("the running job continues", lambda: counted.stat().st_size > written)
    page.show("systemctl restart cotenant@queue   # … and so on, on each machine", "")
    mesh.show("jobs")
    page.add_text(
        "After each restart a job was submitted and ran. The job that runs through all this is still in its first "
        "attempt."
    )


def restore(mesh: Mesh, page: Page, counted: Path, job_id: str) -> None:
    """Lose all of etcd and restore a backup."""
    page.add_text("## All of etcd is lost\n\nA backup is taken while everything runs:")
    backup = mesh.directory / "nightly.backup"
    page.name(backup, "nightly.backup")
    mesh.show("backup", str(backup), "--store", mesh.store)
    page.add_text("Then etcd's disks fail, all three. Jobs run on.")
    for part in [part for part in mesh.processes if part not in AGENTS]:
        mesh.processes.pop(part).terminate()
    for server in mesh.etcd:
        server.kill()
        shutil.rmtree(mesh.directory / server.name)
    for server in mesh.etcd:
        server.start(wait=False)
    for server in mesh.etcd:
        server.wait_until_healthy()
    page.add_text(
        "With the services stopped, the backup is restored into three empty members; then the services start."
    )
    mesh.show("restore", str(backup), "--store", mesh.store)
    for part in mesh.ports:
        mesh.start(part)
    until("the mesh is healthy", lambda: _healthy(mesh))
    before = counted.stat().st_size
    until("the running job continues", lambda: counted.stat().st_size > before)
    until("its agent has reported it", lambda: json.loads(mesh.run("show", job_id, "--json"))["phase"] == "running")
    mesh.show("jobs")
    (mesh.directory / "stop").touch()
    until("the job has succeeded", lambda: json.loads(mesh.run("show", job_id, "--json"))["phase"] == "succeeded")
    attempt = json.loads(mesh.run("show", job_id, "--json"))["attempt"]
    if attempt["number"] != 1:
        raise SystemExit(f"the job was restarted: {attempt}")
    page.add_text(
        "The job has run through the death of a leader, the loss of a majority, an upgrade and the loss of the store, "
        "in one attempt. Its agent reports its end:"
    )
    mesh.show("show", job_id)


@contextmanager
def directory() -> Iterator[Path]:
    """Create a temporary directory, and remove it at the end."""
    path = Path(tempfile.mkdtemp(prefix="ops-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main(arguments: Sequence[str]) -> None:
    """Run all procedures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="run everything without writing the page")
    parser.add_argument("--from", dest="revision", help="start with the version of this git revision and upgrade it")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` cleans up
    page = Page(HEAD)
    with directory() as path, installed_version(options.revision) as version:
        mesh = Mesh(path, page, version)
        page.name(path, "…")
        try:
            set_up(mesh, page)
            counted, stop = path / "counted", path / "stop"
            page.add_text(
                "## A job that runs through everything\n\nIt writes a line every 0.2 s until it is asked to stop."
            )
            loop = f"while [ ! -e {stop} ]; do echo . >> {counted}; sleep 0.2; done"
            words = ("submit", "--name", WITNESS, "--gpus", "1", "--cpus", "1", "--", "sh", "-c", loop)
            shown = "cotenant submit --name witness --gpus 1 --cpus 1 -- sh -c 'while …; do …; sleep 0.2; done'"
            job_id = mesh.show(*words, shown=shown).split()[0]
            until("the job runs", counted.exists)
            lose_the_leader(mesh, page)
            lose_members(mesh, page, counted)
            roll(mesh, page, counted)
            restore(mesh, page, counted, job_id)
        except BaseException:
            for log in sorted(path.glob("*.log")):
                print(f"── {log.name}\n{log.read_text()[-1500:]}", file=sys.stderr)
            raise
        finally:
            mesh.close()
    if not options.check:
        PAGE.write_text(re.sub(r"[ \t]+\n", "\n", page.render()))
        print(f"   wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    os.environ.pop("COTENANT_ENDPOINT", None)
    main(sys.argv[1:])
