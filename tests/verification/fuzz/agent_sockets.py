"""Datagrams to a real node agent in a process of its own: over the progress sockets of real jobs, and the supervisors'.

Many clients send at once: lines that are damaged, huge ones, thousands in a datagram, and as many datagrams as the
kernel takes; some connect and go away, some try streams, which nobody there hears. Every so often the agent has to beat
in time, tell the step that a good client tells last, and hold no more memory and descriptors than before.
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
from tests.verification.fuzz.mutating import Mutator
from tests.verification.fuzz.running import FINDINGS_MAX, GROWTH_BYTES_MAX, SETTLED_SHARE, Finding, Outcome

from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.socket_paths import NOTIFY, progress_socket, socket_directory
from cotenant.v1 import node_service_pb2

NAME = "sockets of an agent"
JOBS = ("a", "b", "c")
PRINTS = "while :; do echo step 5 loss x; head -c 50000 /dev/urandom; sleep 0.2; done"
AT_ONCE = 64
PROBE_EVERY = 20  # rounds
BEAT_SECONDS = 0.5
ANSWER_SECONDS_MAX = 5.0  # between what a good client says and what placement hears; it is told once a second
DATAGRAM_BYTES_MAX = 150_000
LEFT_OPEN_MAX = 16
GONE = (errno.ENOBUFS, errno.EAGAIN, errno.EMSGSIZE, errno.EPROTOTYPE, errno.ECONNREFUSED, errno.EINVAL)


def run(
    name: str, inputs: int, seed: int | str, directory: Path, watch: Callable[[Outcome], None] = lambda outcome: None
) -> Outcome:
    """Send so many inputs."""
    outcome = Outcome(name)
    asyncio.run(_Fuzzing(outcome, Random(f"{name} {seed}"), directory).run(inputs, watch))
    return outcome


class _Fuzzing:
    def __init__(self, outcome: Outcome, rng: Random, directory: Path) -> None:
        self.outcome, self.rng, self.state_dir = outcome, rng, directory / "state"
        self.log = directory / "agent.log"
        self.progress, self.status = Mutator(rng, PROGRESS), Mutator(rng, (STATE,))
        self.step = 1 << 40  # beyond what is made up
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
                self._finding(f"the agent ended with {agent.process.returncode}")
        finally:
            with suppress(ProcessLookupError):
                await agent.end(signal.SIGKILL)
            await end_jobs(self.state_dir)
            await self.placement.stop()

    def _assignment(self, job: str) -> node_service_pb2.Assignment:
        """Two jobs that sleep, and one that prints anything while its progress is looked for in that."""
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
                settled = _held(pid)
        await self._probe(pid, paths[0])
        self.outcome.seconds = time.monotonic() - begun
        memory_bytes, descriptors = _held(pid)
        if settled[0]:
            self.outcome.grown_bytes = memory_bytes - settled[0]
            if descriptors > settled[1] + LEFT_OPEN_MAX:
                self._finding(f"{descriptors - settled[1]} descriptors are left open")
        if self.outcome.grown_bytes > GROWTH_BYTES_MAX:
            self._finding(f"the agent grew by {self.outcome.grown_bytes >> 20} MiB")
        for job in JOBS:
            if self.placement.end(job):
                self._finding(f"job {job} was told to have ended, and runs")

    def _one(self, paths: list[Path], notify: Path) -> None:
        """Send one input in one of many ways."""
        to_supervisors = self.rng.random() < 0.25
        path = notify if to_supervisors else self.rng.choice(paths)
        kind = self.rng.random()
        data = (self.status if to_supervisors else self.progress).draw()
        if kind < 0.1:  # as long as the kernel lets it be
            data = (data or b"x") * (DATAGRAM_BYTES_MAX // (len(data) or 1) + 1)
        elif kind < 0.2:  # very many lines, each with some sense
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
                    self._finding(f"nobody listens at {path.name}: {error}")

    async def _probe(self, pid: int, path: Path) -> None:
        """See that the agent beats, and tells what a good client says last."""
        beats, first = self.placement.beats, self.step + 1
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                while not self._told(first):
                    self.step += 1  # one that is not beyond the last is old news
                    with suppress(BlockingIOError), closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as client:
                        client.setblocking(False)
                        client.sendto(b"step=%d phase=probe" % self.step, str(path))
                    await asyncio.sleep(0.02)
                while self.placement.beats == beats:  # noqa: ASYNC110  # a beat has no event
                    await asyncio.sleep(0.02)
        except TimeoutError:
            what = "does not beat" if self._told(first) else "does not hear a good client"
            self._finding(f"the agent {what} for {ANSWER_SECONDS_MAX:g} s")
        except OSError as error:
            self._finding(f"the agent cannot be told anything: {error}")
        with self.log.open("rb+") as log:
            if (told := log.read()) and (at := told.find(b"Traceback")) >= 0:
                self._finding(f"a traceback: {told[at:][-600:].decode(errors='replace')}")
            log.truncate(0)
        self.placement.progress.clear()
        self.placement.samples.clear()

    def _told(self, step: int) -> bool:
        told = (one.progress for one in self.placement.progress if one.job_id == JOBS[0])
        return any(one.phase == "probe" and one.phase_step >= step for one in told)

    def _finding(self, what: str) -> None:
        if all(finding.what != what for finding in self.outcome.findings):
            self.outcome.findings.append(Finding(self.outcome.target, what, b""))


def _held(pid: int) -> tuple[int, int]:
    """The memory that a process holds, and its descriptors."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE"), len(os.listdir(f"/proc/{pid}/fd"))
