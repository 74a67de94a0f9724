"""Entry point of the agent processes that `cotenant up` starts; `cotenant serve agent` calls `serve` directly.

A service manager must stop only this process, not the processes it started: with systemd, set `KillMode=process`, and
`Delegate=yes` if the agent is to stay within its unit's limits.

`cotenant up` runs `python -m cotenant.node_agent NODE` for each node. The agent reads its settings as one JSON line
from stdin and answers with one line on stdout: ready, or why it cannot run. The parent keeps its end of stdin open
while it lives. When stdin closes, because the parent exited or was killed, the agent exits too; jobs keep running, and
the agent of the next `cotenant up` re-attaches to them.
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
from cotenant.node_agent.control.state_directory import AgentAlreadyRunning, NodeMismatch
from cotenant.node_agent.runtime.socket_paths import UnsafeDirectory
from cotenant.rpc import channel
from cotenant.security.grpc_tls import BadTls
from cotenant.security.tls_files import TlsFiles
from cotenant.telemetry.scraping import CannotServeMetrics

PREDECESSOR_SECONDS_MAX = 10.0  # for the agent of a killed parent to exit
RETRY_SECONDS = 0.1
REASON_CHARACTERS_MAX = 200
REFUSED = 1  # exit code


class BadSettings(ValueError):
    """This release cannot parse the line of settings."""


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """The settings that `cotenant up` passes to an agent.

    `descriptors_max` is the soft limit of file descriptors for jobs. `metrics` is the address at which the agent serves
    its metrics; port 0 means a free one.
    """

    config: AgentConfig
    tls: TlsFiles | None = None
    descriptors_max: int | None = None
    metrics: tuple[str, int] | None = None

    def to_line(self) -> bytes:
        """Return the settings as one line of JSON.

        >>> settings = ChildSettings(AgentConfig("a", Path("/a"), ""), TlsFiles(Path("/ca.pem")), 1024, ("::1", 9464))
        >>> ChildSettings.from_line(settings.to_line()) == settings
        True
        """
        tls = asdict(self.tls) if self.tls else None
        fields = {"config": self.config.to_json(), "tls": tls, "descriptors_max": self.descriptors_max}
        return json.dumps({**fields, "metrics": self.metrics}, default=str).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildSettings:
        """Parse a line that `to_line` wrote, perhaps in another release: `cotenant up` may run on through an upgrade.

        Raises:
            BadSettings: this release cannot parse the line.
        """
        paths = {"ca", "cert", "key"}
        try:
            fields = json.loads(line)
            tls = fields["tls"] and {
                name: Path(value) if name in paths and value else value for name, value in fields["tls"].items()
            }
            config = AgentConfig.from_json(fields["config"])
            metrics = fields.get("metrics") and (str(fields["metrics"][0]), int(fields["metrics"][1]))
            return cls(config, TlsFiles(**tls) if tls else None, fields["descriptors_max"], metrics)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]
            raise BadSettings(
                f"cannot read the agent's settings ({why}); hint: if Cotenant was upgraded while `cotenant up` ran, "
                "restart `cotenant up`"
            ) from error


async def serve(config: AgentConfig, on_start: Callable[[], None] = lambda: None) -> None:
    """Run an agent until SIGTERM or SIGINT; jobs keep running. `on_start` is called once running jobs are known.

    Raises:
        AgentAlreadyRunning: another agent uses the state directory.
    """
    await Agent(config, on_start=on_start).run(_stopped_by_signals())


def _stopped_by_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for caught in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(caught, stop.set)
    return stop


def main() -> int:
    """Run the agent for a parent process as described in the module docstring; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the event loop handles it: no traceback
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 0  # the parent has ended
    try:
        settings = ChildSettings.from_line(line)
    except BadSettings as error:
        _reply(error=str(error), bad_settings=True)
        return REFUSED
    config = settings.config
    sys.stderr = TolerantStream(sys.stderr)
    file_descriptors.raise_limit(settings.descriptors_max)
    structlog.contextvars.bind_contextvars(node=config.node_id)
    try:
        metrics = _expose(*settings.metrics) if settings.metrics else ""
        telemetry.setup("agent", prefix=config.node_id)
        if metrics:
            structlog.get_logger().info("metrics_served", address=metrics)
        fail_points.arm(os.environ.get(fail_points.VARIABLE, ""))
        channel.secure(settings.tls)
        asyncio.run(_serve_parent(config))
    except (AgentAlreadyRunning, NodeMismatch, UnsafeDirectory, BadTls, OSError, ValueError) as error:
        _reply(error=str(error), bad_settings=isinstance(error, BadTls | ValueError))
        return REFUSED
    finally:
        telemetry.shutdown()
    return 0


def _expose(host: str, port: int) -> str:
    """Serve this agent's metrics, and return the address. Wait for an agent of an earlier parent to release it.

    Raises:
        CannotServeMetrics: the address cannot be bound.
    """
    deadline = time.monotonic() + PREDECESSOR_SECONDS_MAX
    while True:
        try:
            return telemetry.expose(host, port)
        except CannotServeMetrics:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)


async def _serve_parent(config: AgentConfig) -> None:
    """Run the agent until the parent exits or closes stdin. Wait for an agent of an earlier parent that still runs."""
    stop = _stopped_by_signals()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _on_stdin, stop)
    deadline = time.monotonic() + PREDECESSOR_SECONDS_MAX
    while not stop.is_set():
        try:
            await Agent(config, on_start=lambda: _reply(ready=True)).run(stop)
        except AgentAlreadyRunning:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_SECONDS)


def _on_stdin(stop: asyncio.Event) -> None:
    """Set `stop` at the end of stdin: the parent closed it or exited."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def _reply(**fields: object) -> None:
    """Write one line of JSON to the parent; ignore a parent that no longer reads."""
    try:
        os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")
    except OSError:
        return


class TolerantStream:
    """A stream whose write errors are ignored: closing the terminal must not end the agent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text; drop it if nothing reads the stream."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        try:
            self._stream.flush()
        except OSError:
            return

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the stream."""
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main())
