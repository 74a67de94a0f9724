"""The agents of `cotenant up`: one process per node, started and supervised here.

Agents are separate processes so that they do not share the control plane's file descriptors, memory and crashes: a
flood of connections that exhausts the services' descriptors leaves agents able to launch, stop and report. There is one
process per node, not per machine, so that agents behave the same as under `cotenant serve agent`.

A process that exits by itself is restarted with exponential backoff. Processes are started before the services are
imported, and receive their settings once the services run: both import in parallel.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cotenant import file_descriptors, telemetry

if TYPE_CHECKING:
    from cotenant.node_agent.control.agent_config import AgentConfig
    from cotenant.security.tls_files import TlsFiles

log = telemetry.logger()

RESTART_SECONDS_FIRST, RESTART_SECONDS_MAX = 0.5, 30.0
STEADY_SECONDS = 60.0  # a process that ran this long resets the backoff
STARTS_MAX = 3  # in a row without ever being ready: further restarts would not help
END_SECONDS_MAX = 10.0  # then it is killed, which does not affect jobs
ANSWERS = frozenset({"ready", "error"})  # each answer of an agent has one of these keys
SHOWN_BYTES_MAX = 200
NOT_INHERITED = ("NOTIFY_SOCKET",)  # systemd waits for `up`


class AgentFailed(Exception):
    """An agent cannot run; the message says why. `bad_settings`: its settings are invalid."""

    def __init__(self, message: str, *, bad_settings: bool = False) -> None:
        super().__init__(message)
        self.bad_settings = bad_settings


class AgentProcess:
    """An agent process, waiting for its settings."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cotenant.node_agent", node_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED},
            start_new_session=True,  # Ctrl-C reaches only `up`, which stops its agents in order
        )

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def send(self, line: bytes) -> None:
        """Send the settings to the process. If it has already exited, `answer` notices."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    async def answer(self) -> dict[str, Any]:
        """Return its answer, ready or an error; empty if it exited without answering.

        Other lines are skipped: a library loaded by the agent may print to the same pipe.
        """
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            while True:
                try:
                    line = await reader.readline()
                except ValueError:  # longer than the reader's limit, and dropped
                    continue
                if not line.endswith(b"\n"):
                    return {}
                if answer := _answer_in(line):
                    return answer
                log.warning("agent_output_skipped", node=self.node_id, text=line[:SHOWN_BYTES_MAX])
        finally:
            transport.close()

    async def wait(self) -> int:
        """Wait until the process exits and return its exit code, or the negated signal number if it was killed."""
        if (code := self._process.poll()) is not None:
            return code
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def close_input(self) -> None:
        """Close its stdin, which makes it shut down in order."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    async def end(self) -> None:
        """Shut the process down and wait for its exit; kill it if it takes too long."""
        self.close_input()
        try:
            async with asyncio.timeout(END_SECONDS_MAX):
                await self.wait()
        except TimeoutError:
            log.warning("agent_process_killed", node=self.node_id, pid=self.pid, after_seconds=END_SECONDS_MAX)
            self._process.kill()
            await self.wait()


def _answer_in(line: bytes) -> dict[str, Any]:
    """Return the answer in a line of an agent's output; empty if the line is not an answer."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) and answer.keys() & ANSWERS else {}


class AgentProcesses:
    """The agent processes of all nodes on this machine."""

    def __init__(
        self, node_ids: Sequence[str] = (), metrics: Mapping[str, tuple[str, int]] = MappingProxyType({})
    ) -> None:
        """Start a process for each of these nodes now; `start` sends them their settings.

        `metrics` has the addresses, by node, at which agents serve their metrics.
        """
        self._metrics = metrics
        self._waiting = {node_id: AgentProcess(node_id) for node_id in node_ids}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, AgentProcess] = {}
        self._rng = Random()

    def start(self, configs: Sequence[AgentConfig], tls: TlsFiles | None) -> None:
        """Run an agent with each of these settings until `close`."""
        for config in configs:
            keeper = asyncio.create_task(self._keep(config, tls), name=f"agent {config.node_id}")
            self._keepers[config.node_id] = keeper

    async def failed(self, seconds: float) -> None:
        """Wait for this long, or until an agent fails.

        Raises:
            AgentFailed: an agent cannot run.
        """
        if not self._keepers:
            await asyncio.sleep(seconds)
            return
        done, _ = await asyncio.wait(self._keepers.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _keep(self, config: AgentConfig, tls: TlsFiles | None) -> None:
        """Keep an agent running until cancelled.

        Raises:
            AgentFailed: it reported an error before ever being ready, or exited several times.
        """
        from cotenant.node_agent.__main__ import ChildSettings
        from cotenant.node_agent.backoff import Backoff

        metrics = self._metrics.get(config.node_id)
        line = ChildSettings(config, tls, file_descriptors.original_limit(), metrics).to_line()
        backoff = Backoff(first_seconds=RESTART_SECONDS_FIRST, longest_seconds=RESTART_SECONDS_MAX, rng=self._rng)
        was_ready, starts = False, 0
        while True:
            process = self._waiting.pop(config.node_id, None) or AgentProcess(config.node_id)
            self._running[config.node_id] = process
            starts += 1
            process.send(line)
            answer = await process.answer()
            was_ready = was_ready or "ready" in answer
            if "error" in answer and not was_ready:
                raise AgentFailed(str(answer["error"]), bad_settings=bool(answer.get("bad_settings")))
            code = await process.wait()
            ended = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            if not was_ready and starts >= STARTS_MAX:
                raise AgentFailed(f"the agent of {config.node_id} {ended} {starts} times before it was ready")
            if time.monotonic() - process.began > STEADY_SECONDS:
                backoff.reset()
            wait_seconds = backoff.next_seconds()
            log.error(
                "agent_process_ended",
                node=config.node_id,
                pid=process.pid,
                how=answer.get("error") or ended,
                restart_seconds=round(wait_seconds, 2),
            )
            await asyncio.sleep(wait_seconds)

    async def close(self) -> None:
        """Shut all agents down; jobs keep running."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        left = [*self._waiting.values(), *self._running.values()]
        self._keepers.clear()
        self._waiting.clear()
        self._running.clear()
        await asyncio.gather(*(process.end() for process in left))
