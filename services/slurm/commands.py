"""What Slurm says, by its commands or by slurmrestd's Unix socket. Each call is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from cotenant.services.slurm import reader
from cotenant.services.slurm.records import Reading

TIMEOUT_SECONDS = 20.0
OUTPUT_BYTES_MAX = 512 * 1024 * 1024
REST_VERSIONS = ("v0.0.43", "v0.0.42", "v0.0.41", "v0.0.40", "v0.0.39", "v0.0.38")
AWAY_WORDS = ("did not answer", "cannot run", "contact", "connect", "timed out", "send failed", "communication")
ID = re.compile(r"\d{1,10}(?:_\d{1,10}|\+\d{1,10})?")


class SlurmAway(Exception):
    """Slurm did not answer, or not in time; the message says what was asked and what happened."""


class SlurmRefused(Exception):
    """Slurm refused a change; the message says which and why. `denied`: the caller may not make it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.denied = "denied" in message.lower() or "permission" in message.lower()


async def run(*command: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bytes:
    """Return the output of one of Slurm's commands.

    Raises:
        SlurmAway: it is missing, failed, or took too long; it is then killed.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise SlurmAway(f"cannot run {command[0]}: {(error.strerror or str(error)).lower()}") from None
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_seconds)
    except TimeoutError:
        raise SlurmAway(f"{command[0]} did not answer within {timeout_seconds:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        said = errors.decode(errors="replace").strip().splitlines()
        raise SlurmAway(f"{command[0]} failed: {said[-1][:200] if said else f'exit code {process.returncode}'}")
    if len(output) > OUTPUT_BYTES_MAX:
        raise SlurmAway(f"{command[0]} wrote more than {OUTPUT_BYTES_MAX:,} bytes")
    return output


class SlurmCommands:
    """Reads by `squeue`, `sinfo`, `scontrol` and `sacct`."""

    def __init__(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds

    async def _run(self, *command: str) -> bytes:
        return await run(*command, timeout_seconds=self._timeout_seconds)

    async def jobs(self) -> Reading:
        """Return all jobs that slurmctld remembers.

        Raises:
            SlurmAway, BadAnswer: it does not answer, or in a way that is not understood.
        """
        return await asyncio.to_thread(reader.read, await self._run("squeue", "--json", "--all", "--states=all"))

    async def nodes(self) -> Reading:
        """Return all nodes; raises as `jobs` does."""
        return await asyncio.to_thread(reader.read, await self._run("sinfo", "--json", "--all"))

    async def configuration(self) -> Mapping[str, str]:
        """Return Slurm's configuration; raises as `jobs` does."""
        text = (await self._run("scontrol", "show", "config")).decode(errors="replace")
        pairs = (line.partition("=") for line in text.splitlines())
        return {name.strip(): value.strip() for name, separator, value in pairs if separator}

    async def partitions(self) -> str:
        """Return the partitions, one a line; raises as `jobs` does."""
        return (await self._run("scontrol", "--oneliner", "show", "partition")).decode(errors="replace")

    async def site_factors(self) -> Mapping[str, int]:
        """Return the SiteFactor of each pending job by its id, that of an array by the array's; raises as `jobs`."""
        return site_factors_of((await self._run("sprio", "--noheader", "--format=%i %S")).decode(errors="replace"))

    async def set_site_factor(self, job_id: str, factor: int, timeout_seconds: float = 5.0) -> None:
        """Set the SiteFactor of a pending job or array.

        Raises:
            SlurmRefused: Slurm does not let us, such as for a job that ended in between.
            SlurmAway: it does not answer.
        """
        await self._update(job_id, f"SiteFactor={factor}", timeout_seconds)

    async def exclude_nodes(self, job_id: str, nodes: Sequence[str], timeout_seconds: float = 5.0) -> None:
        """Set the nodes that a pending job excludes; raises as `set_site_factor` does."""
        await self._update(job_id, f"ExcNodeList={','.join(nodes)}", timeout_seconds)

    async def _update(self, job_id: str, change: str, timeout_seconds: float) -> None:
        try:
            command = ("scontrol", "update", f"JobId={job_id}", change)
            await run(*command, timeout_seconds=min(timeout_seconds, self._timeout_seconds))
        except SlurmAway as error:
            if any(word in str(error).lower() for word in AWAY_WORDS):
                raise
            raise SlurmRefused(f"job {job_id}: {error}") from None

    async def job(self, job_id: str) -> Mapping[str, str]:
        """Return what `scontrol show job` says of one job; empty if it does not know it."""
        if not ID.fullmatch(job_id):
            return {}
        try:
            text = (await self._run("scontrol", "--oneliner", "show", "job", job_id)).decode(errors="replace")
        except SlurmAway:
            return {}
        return pairs_of(text)

    async def accounted(self, job_id: str) -> Mapping[str, str]:
        """Return what the accounting says of the end of one job; empty if there is no accounting."""
        names = ("State", "ExitCode", "Start", "End", "ElapsedRaw")
        if not ID.fullmatch(job_id):
            return {}
        try:
            options = ("--allocations", "--noheader", "--parsable2", f"--format={','.join(names)}")
            text = (await self._run("sacct", "-j", job_id, *options)).decode(errors="replace")
        except SlurmAway:
            return {}
        lines = [line for line in text.splitlines() if line.count("|") == len(names) - 1]
        return dict(zip(names, lines[0].split("|"), strict=True)) if lines else {}


class SlurmRest(SlurmCommands):
    """Reads jobs and nodes from slurmrestd by its Unix socket, and the rest by commands."""

    def __init__(self, path: Path, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        super().__init__(timeout_seconds)
        self._path, self._versions = path, list(REST_VERSIONS)

    async def jobs(self) -> Reading:
        """Return all jobs that slurmctld remembers; raises as with commands."""
        return await asyncio.to_thread(self._read, "jobs")

    async def nodes(self) -> Reading:
        """Return all nodes; raises as with commands."""
        return await asyncio.to_thread(self._read, "nodes")

    def _read(self, what: str) -> Reading:
        """Return an answer of the newest version of the API that slurmrestd has."""
        for version in list(self._versions):
            connection = _UnixConnection(self._path, self._timeout_seconds)
            try:
                connection.request("GET", f"/slurm/{version}/{what}", headers={"Connection": "close"})
                answer = connection.getresponse()
                text = answer.read(OUTPUT_BYTES_MAX)
            except (OSError, http.client.HTTPException) as error:
                raise SlurmAway(f"slurmrestd at {self._path} does not answer: {error}") from None
            finally:
                connection.close()
            if answer.status == http.client.NOT_FOUND:
                continue
            self._versions = [version]
            if answer.status != http.client.OK:
                raise SlurmAway(f"slurmrestd at {self._path} answers {answer.status} {answer.reason}")
            return reader.read(text)
        raise SlurmAway(f"slurmrestd at {self._path} has none of the versions {', '.join(self._versions)}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def pairs_of(text: str) -> Mapping[str, str]:
    """Return the `Name=value` pairs of a line of `scontrol --oneliner`; later ones do not replace earlier ones.

    >>> pairs_of("JobId=17 JobName=a b JobState=FAILED Reason=NonZeroExitCode")["JobState"]
    'FAILED'
    """
    found: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(\S*)", text):
        found.setdefault(name, value)
    return found


def site_factors_of(text: str) -> dict[str, int]:
    """Return the SiteFactors in the lines of `sprio`.

    >>> site_factors_of("17 500\\n18_[3-5] -2\\n19+0 0\\nUnable to read")
    {'17': 500, '18': -2, '19+0': 0}
    """
    found = re.findall(r"^\s*(\d{1,10}(?:\+\d{1,10})?)(?:_\S*)?\s+(-?\d{1,10})\s*$", text, re.MULTILINE)
    return {job: int(factor) for job, factor in found}


def allocates_memory(configuration: Mapping[str, str]) -> bool:
    """Return whether Slurm allocates memory."""
    return "MEMORY" in configuration.get("SelectTypeParameters", "").upper()
