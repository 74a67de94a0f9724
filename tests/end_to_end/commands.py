"""The real command line in processes of its own, and its processes that serve until they are stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.end_to_end.command_server import IMPORTED, SERVED, CommandServer, Forked
from tests.end_to_end.waiting import until

COTENANT = str(Path(sys.executable).with_name("cotenant"))
SERVER = CommandServer(COTENANT, IMPORTED)
SERVING = CommandServer(COTENANT, SERVED)
LONG = frozenset({"up", "serve", "demo", "simulate", "compare"})  # start processes of their own, or compute
SECONDS_MAX = 60.0
Start = Callable[[IO[bytes]], Forked]
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Return its error; there must be exactly one."""
        errors = [line for line in self.err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, f"expected exactly one error:\n{self.err}"
        return errors[0]


def environment_of(home: Path, **more: str) -> dict[str, str]:
    """Return an environment isolated from the user's files and variables."""
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "PYTHONPATH") if name in os.environ}
    own = {"HOME": str(home), "COLUMNS": "200", "COTENANT_SHARE_MACHINE": "1"}  # tests run beside each other
    return {**inherited, **own, **more}


class Cli:
    """Runs commands in one environment. A traceback fails the test, whatever else is expected."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.folder = Path(environment["HOME"])  # where commands are typed: jobs start there
        self.descriptors_max = 0  # the hard limit of what is started to serve; 0: ours

    def __call__(
        self, *arguments: str | Path, code: int = 0, stdin: str = "", seconds: float = SECONDS_MAX, **more: str
    ) -> Outcome:
        """Run a command that must exit with this code."""
        ended = self._run([*map(str, arguments)], stdin, seconds, more)
        outcome = Outcome(ended.returncode, ended.stdout, ended.stderr)
        assert TRACEBACK not in outcome.out + outcome.err, outcome.err
        assert outcome.code == code, f"{arguments} exited with {outcome.code}, not {code}:\n{outcome.out}{outcome.err}"
        return outcome

    def _run(
        self, arguments: list[str], stdin: str, seconds: float, more: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a process of its own; if it is short, in one forked from the command server."""
        environment = {**self.environment, **more}
        if not (more or LONG.intersection(arguments)):
            return SERVER.run(arguments, environment=environment, folder=self.folder, stdin=stdin, seconds=seconds)
        return subprocess.run(
            [COTENANT, *arguments],
            input=stdin,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def json(self, *arguments: str | Path) -> Any:
        """Run a command that prints JSON and return the value."""
        return json.loads(self(*arguments, "--json").out)

    def json_of_any_end(self, *arguments: str | Path) -> Any:
        """Run a command that prints JSON even if it fails, such as `status`, and return the value."""
        ended = self._run([*map(str, arguments), "--json"], "", SECONDS_MAX, {})
        assert TRACEBACK not in ended.stdout + ended.stderr, ended.stderr
        return json.loads(ended.stdout)

    def submit(self, *arguments: str | Path) -> str:
        """Submit one job and return its id."""
        (job_id,) = self("submit", *arguments).out.split()
        return job_id

    def start(self, *arguments: str | Path, log: Path) -> Serving:
        """Start a command that runs until it is stopped; its output is appended to the log."""
        words = [*map(str, arguments)]
        if self.descriptors_max:
            limited = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(self.descriptors_max)]
            return Serving([*limited, COTENANT, *words], self.environment, log)

        def start(output: IO[bytes]) -> Forked:
            with open(os.devnull, "rb") as nothing:
                streams = nothing, output, output
                return SERVING.start(words, environment=self.environment, folder=os.getcwd(), streams=streams)

        return Serving(start, self.environment, log)


class Serving:
    """A serving process, which is stopped only by its pid."""

    def __init__(self, command: Sequence[str] | Start, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0
        self._process: subprocess.Popen[bytes] | Forked
        with log.open("ab") as stream:
            if callable(command):
                self._process = command(stream)
            else:
                self._process = subprocess.Popen(
                    command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
                )

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def said(self) -> str:
        """Return its output so far."""
        with self.log.open("rb") as stream:
            stream.seek(self._begin)
            return stream.read().decode(errors="replace")

    def wait_for_output(self, words: str) -> str:
        """Wait until its output has these words and return the line; fail if it exits first."""

        def found() -> str:
            ended = self._process.poll() is not None
            line = next((line for line in self.said.splitlines() if words in line), "")
            assert line or not ended, f"it exited with {self._process.returncode}:\n{self.said}"
            return line

        return until(found, f"{words!r} in {self.log}")

    def ended(self) -> bool:
        """Return whether it has exited."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it, as a power cut would."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Pause it; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Terminate it and return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(SECONDS_MAX)

    def wait(self) -> int:
        """Wait until it exits and return its exit code."""
        return self._process.wait(SECONDS_MAX)
