"""A mesh of real processes in a directory of its own, that leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end import remains
from tests.end_to_end.clients import Client, published
from tests.end_to_end.commands import TRACEBACK, Cli, Serving, environment_of
from tests.end_to_end.waiting import until

from cotenant.core.lifecycle import ENDED
from cotenant.rpc import translate

GPUS = 4


class Mesh:
    """`cotenant up` with declared GPUs, to be stopped, killed and started again."""

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
        self.process = self.cli.start("up", *self.flags, log=self.log)
        self.process.wait_to_say("the mesh is up")

    @property
    def log(self) -> Path:
        """What all its lives have said."""
        return self.directory / "up.log"

    @property
    def address(self) -> str:
        """Where it serves."""
        return published(self.state_dir)[0]

    def stop(self) -> None:
        """End it as an operator does."""
        assert self.process
        code = self.process.terminate()
        assert code == 0, f"it ended with {code}:\n{self.process.said}"
        self.process = None

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.process:
            self.process.kill()
            self.process = None

    def close(self) -> None:
        """Cancel what runs, end the mesh, and see that nothing is left of it and that it never showed a traceback."""
        job_ids: list[str] = []
        try:
            if self.process:
                job_ids = end_all(self.client)
                self.stop()
        finally:
            self.kill()
            assert_nothing_left(self.directory, job_ids)
        assert TRACEBACK not in self.log.read_text()


def end_all(client: Client) -> list[str]:
    """Cancel every job and wait until all have ended; returns their ids."""
    jobs = client.jobs()
    for job in jobs:
        if translate.PHASES.from_wire(job.phase) not in ENDED:
            client.cancel(job.id)
    for job in jobs:
        client.wait_for(job.id, *ENDED)
    return [job.id for job in jobs]


def assert_nothing_left(directory: Path, job_ids: list[str]) -> None:
    """Fail where a process or a control group is left; end it all the same."""
    try:
        until(lambda: not remains.processes_of(directory), "end of all its processes", seconds=5.0)
    except AssertionError:
        left = remains.processes_of(directory)
        remains.end(left)
        raise AssertionError(f"these processes were left: {left}") from None
    assert remains.groups_of(job_ids) == []
