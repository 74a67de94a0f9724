"""What jobs of these tests run."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.clients import Client
from tests.end_to_end.waiting import lines_of, until

from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.model.lifecycle import Phase


def shell(script: str) -> list[str]:
    """A command line's end that runs a script."""
    return ["--", "sh", "-c", script]


class Load:
    """Many small jobs, each of which writes down once that it ran."""

    def __init__(self, directory: Path, client: Client) -> None:
        self.path = directory / "ran"
        self.acknowledged: list[str] = []
        self._name = f"load of {directory.name}"
        self._client = client

    def submit(self, count: int) -> None:
        """Submit more of them; each is repeated until it is acknowledged."""
        for _ in range(count):
            request_id = f"{self._name}, {len(self.acknowledged)}"
            self.acknowledged.append(self._client.submit(self._spec(), request_id))

    def _spec(self) -> JobSpec:
        script = f"echo $COTENANT_JOB_ID $COTENANT_ATTEMPT >> {self.path}"
        role = Role(request=Request(cores=1))
        return JobSpec(name=self._name, kind=JobKind.CPU, roles=(role,), command=("sh", "-c", script))

    def wait_until_done(self) -> None:
        """Wait until all have succeeded, and see that each ran once and none twice."""
        for job_id in self.acknowledged:
            self._client.wait_for(job_id, Phase.SUCCEEDED)
        ran = sorted(line.split()[0] for line in lines_of(self.path))
        assert ran == sorted(self.acknowledged)
        known = [job.id for job in self._client.jobs() if job.spec.name == self._name]
        assert sorted(known) == sorted(self.acknowledged)


class Counter:
    """A job that counts into a file until a second file tells it to end, and with which status."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.count"
        self._end = directory / f"{name}.end"

    @property
    def command(self) -> list[str]:
        """What to submit. Each line tells who counts, so that a second life would be seen."""
        return shell(
            f"i=0; while [ ! -e {self._end} ]; do i=$((i+1)); echo $i $$ >> {self.path}; sleep 0.02; done; "
            f"exit $(cat {self._end})"
        )

    def count(self) -> int:
        """How far it has come."""
        return len(lines_of(self.path))

    def wait_for_more(self) -> None:
        """Wait until it has counted on, which it does only while it runs."""
        before = self.count()
        until(lambda: self.count() >= before + 3, f"growth of {self.path} beyond {before}")

    def finish(self, status: int = 0) -> None:
        """Tell it to end."""
        partial = self._end.with_suffix(".partial")
        partial.write_text(f"{status}\n")
        partial.rename(self._end)

    def assert_one_life(self) -> None:
        """See that it counted without a gap, in one process."""
        lines = [line.split() for line in lines_of(self.path)]
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
        assert len({pid for _, pid in lines}) == 1
