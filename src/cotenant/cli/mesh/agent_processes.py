"""The agents of `cotenant up`: one process per node, started and supervised here.

An agent is a process of its own so that the control plane's file descriptors, memory and crashes are not the agent's: a
flood of connections that takes the last descriptor of the services leaves the agent able to launch, to stop and to
report. There is one per node, not one per machine, as where `cotenant serve agent` runs: what holds there holds here.

A process that ends by itself is started again, after a wait that doubles while it keeps ending. Processes are started
before the services are imported, and get their settings once these serve: they import meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from cotenant import file_descriptors, telemetry

if TYPE_CHECKING:
    from cotenant.node_agent.control.agent_config import AgentConfig
    from cotenant.security.tls_files import TlsFiles

log = telemetry.logger()

RESTART_SECONDS_FIRST, RESTART_SECONDS_MAX = 0.5, 30.0
STEADY_SECONDS = 60.0  # after which an end is not taken as one in a row
STARTS_MAX = 3  # in a row, without ever having been ready: then something is wrong that another start does not mend
END_SECONDS_MAX = 10.0  # then it is killed, which does no harm to jobs
ANSWERS = frozenset({"ready", "error"})  # one of these is in each answer of an agent
SHOWN_BYTES_MAX = 200
NOT_INHERITED = ("NOTIFY_SOCKET",)  # systemd waits for `up`


class AgentFailed(Exception):
    """An agent cannot run; the message says why. `bad_settings`: it was told something that cannot be."""

    def __init__(self, message: str, *, bad_settings: bool = False) -> None:
        super().__init__(message)
        self.bad_settings = bad_settings


class AgentProcess:
    """One process, which waits for its settings."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cotenant.node_agent", node_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED},
            start_new_session=True,  # Ctrl-C is for `up`, which ends its agents in order
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, line: bytes) -> None:
        """Write its settings. One that has ended already is found by `answer`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    async def answer(self) -> dict[str, Any]:
        """Return what it says once: that it is ready, or why it cannot be; nothing where it ended without a word.

        Other lines are skipped: a library that the agent loads may print to the same pipe.
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
        """Wait for its end, and return the exit code; of one that was killed the negative number of the signal."""
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

    def leave(self) -> None:
        """Close its stdin: it ends in order."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    async def end(self) -> None:
        """Have it end, and wait for that."""
        self.leave()
        try:
            async with asyncio.timeout(END_SECONDS_MAX):
                await self.wait()
        except TimeoutError:
            log.warning("agent_process_killed", node=self.node_id, pid=self.pid, after_seconds=END_SECONDS_MAX)
            self._process.kill()
            await self.wait()


def _answer_in(line: bytes) -> dict[str, Any]:
    """Return the answer in a line of an agent's output; nothing where it is not one."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) and answer.keys() & ANSWERS else {}


class AgentProcesses:
    """The processes of all nodes of this machine."""

    def __init__(self, node_ids: Sequence[str] = ()) -> None:
        """Start a process for each of these nodes at once; `start` gives them their settings."""
        self._waiting = {node_id: AgentProcess(node_id) for node_id in node_ids}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, AgentProcess] = {}
        self._rng = Random()

    def start(self, configs: Sequence[AgentConfig], tls: TlsFiles | None) -> None:
        """Run an agent with each of these settings, until `close`."""
        for config in configs:
            keeper = asyncio.create_task(self._keep(config, tls), name=f"agent {config.node_id}")
            self._keepers[config.node_id] = keeper

    async def failed(self, seconds: float) -> None:
        """Wait for so long.

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
            AgentFailed: it was never ready, and says why it cannot be, or has ended several times.
        """
        from cotenant.node_agent.__main__ import ChildSettings
        from cotenant.node_agent.backoff import Backoff

        line = ChildSettings(config, tls, file_descriptors.original_limit()).to_line()
        backoff = Backoff(first_seconds=RESTART_SECONDS_FIRST, longest_seconds=RESTART_SECONDS_MAX, rng=self._rng)
        was_ready, starts = False, 0
        while True:
            process = self._waiting.pop(config.node_id, None) or AgentProcess(config.node_id)
            self._running[config.node_id] = process
            starts += 1
            process.tell(line)
            answer = await process.answer()
            was_ready = was_ready or "ready" in answer
            if "error" in answer and not was_ready:
                raise AgentFailed(str(answer["error"]), bad_settings=bool(answer.get("bad_settings")))
            code = await process.wait()
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
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
        """End all of them; jobs run on."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        left = [*self._waiting.values(), *self._running.values()]
        self._keepers.clear()
        self._waiting.clear()
        self._running.clear()
        await asyncio.gather(*(process.end() for process in left))
