"""Datagrams to a real node agent in a separate process: to the progress sockets of real jobs, and to the supervisors'.

Many clients send at once: damaged lines, huge lines, thousands of lines in a datagram, and as many datagrams as the
kernel accepts; some connect and disconnect, some try streams, which the agent does not support. At intervals the agent
must send its heartbeat in time, report the last step of a valid client, and hold no more memory and descriptors than
before.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from tests.unit.node_agent.agent_process import AgentProcess
from tests.unit.node_agent.conftest import end_jobs
from tests.unit.node_agent.jobs import NODE, assignment
from tests.unit.node_agent.placement import Placement
from tests.verification.fuzz.agent_files import PROGRESS, STATE
from tests.verification.fuzz.mutator import Mutator
from tests.verification.fuzz.runner import FINDINGS_MAX, GROWTH_BYTES_MAX, SETTLED_SHARE, Finding, Outcome

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.socket_paths import NOTIFY, progress_socket, socket_directory

NAME = "agent sockets"
JOBS = ("a", "b", "c")
PRINTS = "while :; do echo step 5 loss x; head -c 50000 /dev/urandom; sleep 0.2; done"
AT_ONCE = 64
PROBE_EVERY = 20  # rounds
BEAT_SECONDS = 0.5
ANSWER_SECONDS_MAX = 5.0  # from a valid client's report to placement; the agent reports once a second
DATAGRAM_BYTES_MAX = 150_000
LEAKED_DESCRIPTORS_MAX = 16
GONE = (errno.ENOBUFS, errno.EAGAIN, errno.EMSGSIZE, errno.EPROTOTYPE, errno.ECONNREFUSED, errno.EINVAL)


def run(
    name: str, inputs: int, seed: int | str, directory: Path, watch: Callable[[Outcome], None] = lambda outcome: None
) -> Outcome:
    """Send a number of inputs."""
    outcome = Outcome(name)
    asyncio.run(_Fuzzing(outcome, Random(f"{name} {seed}"), directory).run(inputs, watch))
    return outcome


class _Fuzzing:
    def __init__(self, outcome: Outcome, rng: Random, directory: Path) -> None:
        self.outcome, self.rng, self.state_dir = outcome, rng, directory / "state"
        self.log = directory / "agent.log"
        self.progress, self.status = Mutator(rng, PROGRESS), Mutator(rng, (STATE,))
        self.step = 1 << 40  # more than the declared ones
        self.placement = Placement()

    async def run(self, inputs: int, watch: Callable[[Outcome], None]) -> None:
        self.placement.heartbeat_seconds = BEAT_SECONDS
        await self.placement.start()
        logged = ("/bin/sh", "-c", f'exec "$@" >>{self.log} 2>&1', "sh")
        agent = AgentProcess(self.placement, self.state_dir, prefix=logged, node_id=f"{NODE}-sockets")
        await agent.start()
        try:
            await self.placement.connected()
            self.placement.assign(*(self._assignment(job) for job in JOBS))
            for job in JOBS:
                await self.placement.running(job)
            assert agent.process
            await self._fuzz(inputs, agent.process.pid, watch)
            if agent.process.returncode is not None:
                self._finding(f"the agent exited with {agent.process.returncode}")
        finally:
            with suppress(ProcessLookupError):
                await agent.end(signal.SIGKILL)
            await end_jobs(self.state_dir)
            await self.placement.stop()

    def _assignment(self, job: str) -> agent_pb2.Assignment:
        """Return two jobs that sleep, and one that prints random output with progress patterns."""
        command = ["sh", "-c", PRINTS] if job == JOBS[-1] else ["sleep", "86400"]
        made = assignment(job, command, node_id=f"{NODE}-sockets")
        if job == JOBS[-1]:
            made.spec.progress.regex = r"step (\d+)"
        return made

    async def _fuzz(self, inputs: int, pid: int, watch: Callable[[Outcome], None]) -> None:
        begun, rounds, settled = time.monotonic(), 0, (0, 0)
        sockets = socket_directory(self.state_dir)
        paths = [progress_socket(sockets, AttemptKey(job, 1)) for job in JOBS]
        await self._probe(pid, paths[0])
        while self.outcome.inputs < inputs and len(self.outcome.findings) < FINDINGS_MAX:
            some = min(AT_ONCE, inputs)
            for _ in range(some):
                self._one(paths, sockets / NOTIFY)
            await asyncio.sleep(0)
            self.outcome.inputs, rounds = self.outcome.inputs + some, rounds + 1
            if not rounds % PROBE_EVERY:
                await self._probe(pid, paths[0])
                self.outcome.seconds = time.monotonic() - begun
                watch(self.outcome)
            if not settled[0] and self.outcome.inputs >= inputs * SETTLED_SHARE:
                settled = _memory_and_descriptors(pid)
        await self._probe(pid, paths[0])
        self.outcome.seconds = time.monotonic() - begun
        memory_bytes, descriptors = _memory_and_descriptors(pid)
        if settled[0]:
            self.outcome.grown_bytes = memory_bytes - settled[0]
            if descriptors > settled[1] + LEAKED_DESCRIPTORS_MAX:
                self._finding(f"{descriptors - settled[1]} leaked descriptors")
        if self.outcome.grown_bytes > GROWTH_BYTES_MAX:
            self._finding(f"the agent grew by {self.outcome.grown_bytes >> 20} MiB")
        for job in JOBS:
            if self.placement.end(job):
                self._finding(f"job {job} was reported as ended, and still runs")

    def _one(self, paths: list[Path], notify: Path) -> None:
        """Send one input in one of many ways."""
        to_supervisors = self.rng.random() < 0.25
        path = notify if to_supervisors else self.rng.choice(paths)
        kind = self.rng.random()
        data = (self.status if to_supervisors else self.progress).draw()
        if kind < 0.1:  # as the kernel accepts it
            data = (data or b"x") * (DATAGRAM_BYTES_MAX // (len(data) or 1) + 1)
        elif kind < 0.2:  # very many lines, each of them meaningful
            data = b"".join(
                b"step=%d\n" % self.rng.randrange(1 << 30) for _ in range(self.rng.choice((10, 500, 5_000)))
            )
        elif kind < 0.25:
            data = b"\n" * self.rng.randint(0, 65_536)
        stream = self.rng.random() < 0.05
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM)) as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            try:
                if stream or self.rng.random() < 0.3:
                    client.connect(str(path))
                    client.send(data)
                    if self.rng.random() < 0.5:
                        client.shutdown(self.rng.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))
                    client.send(data)
                else:
                    for _ in range(self.rng.choice((1, 1, 1, 2, 300))):
                        client.sendto(data, str(path))
            except OSError as error:
                self.outcome.refused += 1
                if error.errno not in (*GONE, errno.EPIPE, errno.ENOTCONN):
                    self._finding(f"no listener at {path.name}: {error}")

    async def _probe(self, pid: int, path: Path) -> None:
        """Check that the agent sends heartbeats, and reports the last step of a valid client."""
        beats, first = self.placement.beats, self.step + 1
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                while not self._has_reported(first):
                    self.step += 1  # only a larger step is news
                    with suppress(BlockingIOError), closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as client:
                        client.setblocking(False)
                        client.sendto(b"step=%d phase=probe" % self.step, str(path))
                    await asyncio.sleep(0.02)
                while self.placement.beats == beats:  # noqa: ASYNC110  # a heartbeat has no event
                    await asyncio.sleep(0.02)
        except TimeoutError:
            what = "sends no heartbeat" if self._has_reported(first) else "does not report a valid client's step"
            self._finding(f"the agent {what} for {ANSWER_SECONDS_MAX:g} s")
        except OSError as error:
            self._finding(f"the agent cannot be reached: {error}")
        with self.log.open("rb+") as log:
            if (output := log.read()) and (at := output.find(b"Traceback")) >= 0:
                self._finding(f"a traceback: {output[at:][-600:].decode(errors='replace')}")
            log.truncate(0)
        self.placement.progress.clear()
        self.placement.samples.clear()

    def _has_reported(self, step: int) -> bool:
        reports = (one.progress for one in self.placement.progress if one.job_id == JOBS[0])
        return any(one.phase == "probe" and one.phase_step >= step for one in reports)

    def _finding(self, what: str) -> None:
        if all(finding.what != what for finding in self.outcome.findings):
            self.outcome.findings.append(Finding(self.outcome.target, what, b""))


def _memory_and_descriptors(pid: int) -> tuple[int, int]:
    """Return the memory and the number of descriptors of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{pid}/fd"))
