"""Programs that the tests' jobs run."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.clients import Client
from tests.end_to_end.waiting import lines_of, until

from cotenant.core.model.job import JobKind, JobSpec, Request, Role
from cotenant.core.model.lifecycle import Phase


def shell(script: str) -> list[str]:
    """Return the command arguments that run a script."""
    return ["--", "sh", "-c", script]


class Load:
    """Many small jobs, each of which records once that it ran."""

    def __init__(self, directory: Path, client: Client) -> None:
        self.path = directory / "ran"
        self.acknowledged: list[str] = []
        self._name = f"load of {directory.name}"
        self._client = client

    def submit(self, count: int) -> None:
        """Submit more jobs; each submission is retried until it is acknowledged."""
        for _ in range(count):
            request_id = f"{self._name}, {len(self.acknowledged)}"
            self.acknowledged.append(self._client.submit(self._spec(), request_id))

    def _spec(self) -> JobSpec:
        script = f"echo $COTENANT_JOB_ID $COTENANT_ATTEMPT >> {self.path}"
        role = Role(request=Request(cores=1))
        return JobSpec(name=self._name, kind=JobKind.CPU, roles=(role,), command=("sh", "-c", script))

    def wait_until_done(self) -> None:
        """Wait until all have succeeded, and check that each ran exactly once."""
        for job_id in self.acknowledged:
            self._client.wait_for(job_id, Phase.SUCCEEDED)
        ran = sorted(line.split()[0] for line in lines_of(self.path))
        assert ran == sorted(self.acknowledged)
        known = [job.id for job in self._client.jobs() if job.spec.name == self._name]
        assert sorted(known) == sorted(self.acknowledged)


class Counter:
    """A job that counts into a file until a second file gives it the exit status."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.count"
        self._end = directory / f"{name}.end"

    @property
    def command(self) -> list[str]:
        """The command to submit. Each line has the pid, so that a second run would be noticed."""
        return shell(
            f"i=0; while [ ! -e {self._end} ]; do i=$((i+1)); echo $i $$ >> {self.path}; sleep 0.1; done; "
            f"exit $(cat {self._end})"
        )

    def count(self) -> int:
        """Return the current count."""
        return len(lines_of(self.path))

    def wait_for_more(self) -> None:
        """Wait until the count has grown, which it does only while the job runs."""
        before = self.count()
        until(lambda: self.count() >= before + 3, f"growth of {self.path} beyond {before}")

    def finish(self, status: int = 0) -> None:
        """Make it exit."""
        partial = self._end.with_suffix(".partial")
        partial.write_text(f"{status}\n")
        partial.rename(self._end)

    def assert_one_life(self) -> None:
        """Check that it counted without a gap in one process."""
        lines = [line.split() for line in lines_of(self.path)]
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
        assert len({pid for _, pid in lines}) == 1
