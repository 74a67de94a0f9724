"""Slurm's own commands, by which pilots are submitted, found and cancelled. All state is in Slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from cotenant.cli.outcome import CommandError
from cotenant.cli.pilots.plan import Pilot

SECONDS_MAX = 30.0
LIVE_STATES = frozenset(
    ("RUNNING", "PENDING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "RESIZING", "SIGNALING")
)
ENDING = "COMPLETING"
UNKNOWN_JOB = "invalid job id"


class SlurmRefused(Exception):
    """A command of Slurm failed; the text has Slurm's words."""


class Slurm:
    """The commands sbatch, squeue and scancel, with the pilots of one name."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self._name, self._environment = name, environment

    def pilots(self) -> list[Pilot]:
        """Return the pilots that run or are pending, the oldest first. Raises `SlurmRefused`."""
        command = ["squeue", "-h", "--me", "--name", self._name, "-o", "%A|%T"]
        rows = [line.strip().partition("|") for line in self._call(command).splitlines()]
        live = [(int(job), state) for job, _, state in rows if job.isdigit() and state != ENDING]
        return [Pilot(str(job), pending=state == "PENDING") for job, state in sorted(live)]

    def submit(self, options: Sequence[str], script: str) -> str:
        """Submit a pilot and return its id. Raises `SlurmRefused`."""
        command = ["sbatch", "--parsable", "--job-name", self._name, *options]
        return self._call(command, script).strip().partition(";")[0]

    def cancel(self, pilots: Sequence[str]) -> None:
        """Cancel pilots that are still pending. Raises `SlurmRefused`."""
        if pilots:
            self._call(["scancel", "--state=PENDING", *pilots])

    def has_ended(self, pilot: str) -> bool:
        """Return whether nothing of a pilot is left, by Slurm's word. Raises `SlurmRefused`."""
        try:
            state = self._call(["squeue", "-h", "-t", "all", "-j", pilot, "-o", "%T"]).strip()
        except SlurmRefused as error:
            if UNKNOWN_JOB in str(error).lower():
                return True  # it ended so long ago that Slurm has forgotten it
            raise
        return bool(state) and state not in LIVE_STATES

    def _call(self, command: Sequence[str], text: str = "") -> str:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **self._environment},
                input=text,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS_MAX,
                check=False,
            )
        except FileNotFoundError:
            raise CommandError(
                f"{command[0]} is not installed here",
                hint="run this on a machine from which jobs are submitted to Slurm",
            ) from None
        except (OSError, subprocess.SubprocessError) as error:
            raise SlurmRefused(f"{command[0]}: {error}") from None
        if done.returncode:
            words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise SlurmRefused(words if words.startswith(command[0]) else f"{command[0]}: {words}")
        return done.stdout
