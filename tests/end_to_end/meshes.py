"""Meshes of real processes in their own directories, which leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end import remains
from tests.end_to_end.clients import Client, published
from tests.end_to_end.commands import TRACEBACK, Cli, Serving, environment_of
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports

from cotenant.codec import specs
from cotenant.core.model.lifecycle import ENDED

GPUS = 4
BASELINES = ("--profile", "plain")  # jobs start in order, with shares of cores that tests can compute
ATTEMPTS = "state/nodes/*/attempts/*-*"


class Mesh:
    """`cotenant up` with declared GPUs, which can be stopped, killed and restarted."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.state_dir = directory / "state"
        self.flags = flags or ("--gpus", f"fake:{GPUS}")
        self.cli = Cli(environment_of(directory, COTENANT_STATE_DIR=str(self.state_dir)))
        self.client = Client(lambda: published(self.state_dir))
        self.process: Serving | None = None

    def start(self) -> None:
        """Start it and wait until it is up."""
        assert self.process is None
        self.process = self.cli.start("up", *BASELINES, "--contention", "coda-eliminator", *self.flags, log=self.log)
        self.process.wait_for_output("the mesh is up")

    @property
    def log(self) -> Path:
        """The log of all its runs."""
        return self.directory / "up.log"

    @property
    def address(self) -> str:
        """Return its address."""
        return published(self.state_dir)[0]

    def stop(self) -> None:
        """Stop it as an operator does."""
        assert self.process
        code = self.process.terminate()
        assert code == 0, f"it exited with {code}:\n{self.process.said}"
        self.process = None

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        if self.process:
            self.process.kill()
            self.process = None

    def close(self) -> None:
        """Cancel all jobs, stop the mesh, and check that nothing is left and that it never printed a traceback."""
        job_ids: list[str] = []
        try:
            if self.process is None:
                self.start()  # a failed test may have left jobs
            job_ids = end_all(self.client)
            self.stop()
        finally:
            self.kill()
            assert_nothing_left(self.directory, job_ids)
        assert TRACEBACK not in self.log.read_text()


@contextmanager
def configured_mesh(directory: Path, config: str) -> Iterator[Mesh]:
    """Run a mesh with a configuration, which is closed at the end."""
    path = directory / "config.toml"
    path.write_text(config)
    mesh = Mesh(directory, "--config", str(path))
    mesh.start()
    yield mesh
    mesh.close()


def start_agent(mesh: Mesh, node: str, gpus: int) -> Serving:
    """Start the agent of another node on this machine, and wait until it is connected."""
    agent = mesh.cli.start(
        "serve", "agent", "--node", node, "--endpoints", mesh.address, "--gpus", f"fake:{gpus}",
        "--address", "127.0.0.1", log=mesh.directory / f"{node}.log",
    )  # fmt: skip
    try:
        agent.wait_for_output("placement_connected")
    except BaseException:
        agent.kill()
        raise
    return agent


@contextmanager
def second_node(mesh: Mesh) -> Iterator[None]:
    """Another node on this machine with its own agent."""
    agent = start_agent(mesh, "second", 2)
    try:
        yield
        end_all(mesh.client)
        assert agent.terminate() == 0
    finally:
        agent.kill()


SERVICES = ("predictor", "contention", "placement", "queue", "agent")  # in a valid startup order
SERVING = {"agent": "placement_connected"}  # the log line when it is up; services print where they serve


REPLICATED = ("predictor", "contention", "placement-a", "placement-b", "queue-a", "queue-b", "agent")


class Separate:
    """The services and one agent, each in its own process at a fixed port.

    `parts` are services, or several processes of one, told apart by what stands behind a dash. `flags` are a
    service's own.
    """

    def __init__(
        self, directory: Path, *, store: str = "sqlite", parts: Sequence[str] = SERVICES, **environment: str
    ) -> None:
        self.directory = directory
        self.state_dir = directory / "state"
        self.store = store
        self.parts = parts
        served = [part for part in parts if part != "agent"]
        self.ports = dict(zip(served, free_ports(len(served)), strict=True))
        replicas = {service: "|".join(self._addresses(service)) for service in map(service_of, served)}
        endpoints = ",".join(f"{name}={addresses}" for name, addresses in replicas.items())
        reached = {"COTENANT_STATE_DIR": str(self.state_dir), "COTENANT_ENDPOINT": endpoints}
        self.cli = Cli(environment_of(directory, **reached, **environment))
        self.client = Client(lambda: (self.reached("queue"), (self.state_dir / "token").read_text().strip()))
        self.processes: dict[str, Serving] = {}
        self.flags: dict[str, list[str]] = {}
        self._endpoints = endpoints

    def address(self, part: str) -> str:
        """Return the address of a part."""
        return f"127.0.0.1:{self.ports[part]}"

    def _addresses(self, service: str) -> list[str]:
        return [self.address(part) for part in self.ports if service_of(part) == service]

    def reached(self, service: str) -> str:
        """Return a service's address: that of its first running process, or of its first process."""
        running = (self.address(part) for part in self.processes if service_of(part) == service)
        return next(running, self._addresses(service)[0])

    def log(self, service: str) -> Path:
        """Return the log of all runs of a service."""
        return self.directory / f"{service}.log"

    def start(self, *services: str) -> None:
        """Start services and wait until they serve."""
        for service in services:
            assert service not in self.processes
            self.processes[service] = self.cli.start(
                "serve", service_of(service), *self._flags(service), log=self.log(service)
            )
        for service in services:
            self.processes[service].wait_for_output(SERVING.get(service, f"{service_of(service)} serves at"))

    def _flags(self, service: str) -> list[str]:
        if service == "agent":
            return ["--endpoints", self._endpoints, "--gpus", f"fake:{GPUS}", "--address", "127.0.0.1"]
        own = self.flags.get(service_of(service), [])
        reached = ["--endpoints", self._endpoints, "--listen", self.address(service), "--store", self.store]
        return [*reached, *(() if service == "contention" else BASELINES), *own]

    def kill(self, *services: str) -> None:
        """Kill some services, or all, as a power cut would."""
        for service in services or tuple(self.processes):
            self.processes.pop(service).kill()

    def close(self) -> None:
        """Cancel all jobs, stop all services as an operator does, and check that nothing is left."""
        job_ids: list[str] = []
        codes: dict[str, int] = {}
        try:
            self.start(*(name for name in self.parts if name not in self.processes))
            job_ids = end_all(self.client)
            codes = {name: self.processes.pop(name).terminate() for name in reversed(self.parts)}
        finally:
            self.kill()
            assert_nothing_left(self.directory, job_ids)
        assert codes == dict.fromkeys(self.parts, 0)
        assert [name for name in self.parts if TRACEBACK in self.log(name).read_text()] == []


def service_of(part: str) -> str:
    """Return the service of a part."""
    return part.partition("-")[0]


def end_all(client: Client) -> list[str]:
    """Cancel every job, wait until all have ended, and return their ids."""
    jobs = client.jobs()
    for job in jobs:
        if specs.PHASES.from_wire(job.phase) not in ENDED:
            client.cancel(job.id)
    for job in jobs:
        client.wait_for(job.id, *ENDED)
    return [job.id for job in jobs]


def assert_nothing_left(directory: Path, job_ids: list[str]) -> None:
    """Fail if a process or a control group is left; remove it in any case."""
    try:
        until(lambda: not remains.processes_of(directory), "end of all its processes", seconds=5.0)
    except AssertionError:
        left = remains.processes_of(directory)
        remains.end(left)
        until(lambda: not remains.processes_of(directory), "end of what was killed", seconds=5.0)
        remains.remove(remains.groups_of(path.name.rpartition("-")[0] for path in directory.glob(ATTEMPTS)))
        raise AssertionError(f"these processes were left: {left}") from None
    assert remains.groups_of(job_ids) == []
