"""The composition root of an agent: of `cotenant serve agent`, and of the agents that `cotenant up` starts.

A service manager must end this process alone, not all that it has started: with systemd, `KillMode=process`, and
`Delegate=yes` where the agent is to stay within its unit's limits.

`cotenant up` runs `python -m cotenant.node_agent NODE` for each node. The agent reads its settings as one line from
stdin, and answers with one line on stdout: that it is ready, or why it cannot be. The parent keeps its end of stdin
open for as long as it lives. Where that closes, because the parent has ended or was killed, the agent ends too; jobs
run on, and the agent of the next `cotenant up` takes them up.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import structlog

from cotenant import fail_points, file_descriptors, telemetry
from cotenant.node_agent.control.agent import Agent
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.node_agent.control.state_directory import AnotherAgent, AnotherNode
from cotenant.node_agent.runtime.socket_paths import UnsafeDirectory
from cotenant.rpc import channel
from cotenant.security.grpc_tls import BadTls
from cotenant.security.tls_files import TlsFiles

PREDECESSOR_SECONDS_MAX = 10.0  # which the agent of a parent that was killed may take to end
RETRY_SECONDS = 0.1
REASON_CHARACTERS_MAX = 200
REFUSED = 1  # exit code of an agent that cannot run


class BadSettings(ValueError):
    """The line of settings cannot be read by this release."""


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """What `cotenant up` tells an agent. `descriptors_max` is the soft limit of descriptors that jobs get."""

    config: AgentConfig
    tls: TlsFiles | None = None
    descriptors_max: int | None = None

    def to_line(self) -> bytes:
        """Write it as one line.

        >>> settings = ChildSettings(AgentConfig("a", Path("/a"), ""), TlsFiles(Path("/ca.pem")), 1024)
        >>> ChildSettings.from_line(settings.to_line()) == settings
        True
        """
        tls = asdict(self.tls) if self.tls else None
        told = {"config": self.config.to_json(), "tls": tls, "descriptors_max": self.descriptors_max}
        return json.dumps(told, default=str).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildSettings:
        """Read what `to_line` wrote, which may be that of another release: `cotenant up` runs on through an upgrade.

        Raises:
            BadSettings: this release cannot read the line.
        """
        paths = {"ca", "cert", "key"}
        try:
            told = json.loads(line)
            tls = told["tls"] and {
                name: Path(value) if name in paths and value else value for name, value in told["tls"].items()
            }
            return cls(AgentConfig.from_json(told["config"]), TlsFiles(**tls) if tls else None, told["descriptors_max"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]
            raise BadSettings(
                f"the agent's settings cannot be read ({why}); hint: restart `cotenant up` if Cotenant was upgraded "
                "while it ran"
            ) from error


async def serve(config: AgentConfig, on_start: Callable[[], None] = lambda: None) -> None:
    """Run an agent until SIGTERM or SIGINT; jobs run on. `on_start` is told once it knows what runs on the node.

    Raises:
        AnotherAgent: the state directory is in use.
    """
    await Agent(config, on_start=on_start).run(_stopped_by_signals())


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for caught in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(caught, stop.set)
    return stop


def main() -> int:
    """Run the agent of a parent, as the module's docstring says; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the loop handles it, and shows no traceback
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0  # the parent has ended
    try:
        settings = ChildSettings.from_line(line)
    except BadSettings as error:
        _answer(error=str(error), bad_settings=True)
        return REFUSED
    config = settings.config
    sys.stderr = Unfailing(sys.stderr)
    file_descriptors.raise_limit(settings.descriptors_max)
    telemetry.setup("agent", prefix=config.node_id)
    structlog.contextvars.bind_contextvars(node=config.node_id)
    try:
        fail_points.arm(os.environ.get(fail_points.VARIABLE, ""))
        channel.secure(settings.tls)
        asyncio.run(_serve_parent(config))
    except (AnotherAgent, AnotherNode, UnsafeDirectory, BadTls, OSError, ValueError) as error:
        _answer(error=str(error), bad_settings=isinstance(error, BadTls | ValueError))
        return REFUSED
    finally:
        telemetry.shutdown()
    return 0


async def _serve_parent(config: AgentConfig) -> None:
    """Run the agent until the parent is gone or says so. One that still runs for an earlier parent is waited for."""
    stop = _stopped_by_signals()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _hear, stop)
    deadline = time.monotonic() + PREDECESSOR_SECONDS_MAX
    while not stop.is_set():
        try:
            await Agent(config, on_start=lambda: _answer(ready=True)).run(stop)
        except AnotherAgent:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_SECONDS)


def _hear(stop: asyncio.Event) -> None:
    """Notice the end of stdin: the parent has closed it, or is gone."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def _answer(**told: object) -> None:
    """Answer the parent, if it still listens."""
    try:
        os.write(sys.stdout.fileno(), json.dumps(told).encode() + b"\n")
    except OSError:
        return


class Unfailing:
    """A stream whose reader may go away: a terminal that is closed must not end the agent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, unless nobody can read it."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush, unless nobody can read it."""
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        """Be the stream in all else."""
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main())
