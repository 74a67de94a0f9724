"""`cotenant up` with settings of a benchmark's own, its commands, and the samples of its agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import grpc

from cotenant.rpc.access import find
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1.contention_service_pb2_grpc import ContentionServiceStub

COTENANT = str(Path(sys.executable).with_name("cotenant"))
ROOT = Path(__file__).resolve().parent.parent
START_SECONDS_MAX = 120.0
SECONDS_MAX = 30.0  # for steps that should take one second
NOTHING: Mapping[str, str] = MappingProxyType({})
T = TypeVar("T")


class MeshFailed(Exception):
    """The mesh, or a job on it, failed; the message says how."""


class LocalMesh:
    """`cotenant up` with its settings in TOML and its state in a directory; jobs start in the root of the checkout."""

    def __init__(self, directory: Path, settings: str, environment: Mapping[str, str] = NOTHING) -> None:
        self.directory = directory
        self.environment = {**os.environ, "COTENANT_STATE_DIR": str(directory), **environment}
        config = directory / "config.toml"
        config.write_text(settings)
        self.log = directory / "up.log"
        begin = time.monotonic()
        with self.log.open("w") as stream:
            self.process = subprocess.Popen(
                [COTENANT, "up", "--config", str(config)], env=self.environment, stdout=stream, stderr=stream
            )
        try:
            self.until(lambda: "the mesh is up" in self.log.read_text(), "its start", START_SECONDS_MAX)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.start_seconds = time.monotonic() - begin
        access = find(directory, {})
        self._token = (("authorization", f"Bearer {access.token}"),)
        self._channel = grpc.insecure_channel(access.endpoints.contention)
        self._contention = ContentionServiceStub(self._channel)
        self._last = 0.0

    def close(self) -> None:
        """Cancel all jobs, wait for their end, and stop the mesh."""
        try:
            if self.process.poll() is None:
                self._end_jobs()
        finally:
            self._channel.close()
            self.process.terminate()
            try:
                self.process.wait(SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _end_jobs(self) -> None:
        with suppress(MeshFailed):
            if jobs := [job["id"] for job in self.json("jobs")]:
                self.run("cancel", *jobs)
                self.until(lambda: not self.json("jobs"), "the end of all jobs")

    def until(self, look: Callable[[], T], what: str, seconds: float = SECONDS_MAX) -> T:
        """Call `look` until it returns something true, and return that.

        Raises:
            MeshFailed: it takes too long, or the mesh has ended.
        """
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if self.process.poll() is not None:
                raise MeshFailed(f"the mesh ended: {self.log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise MeshFailed(f"waited {seconds:g} s for {what}")
            time.sleep(0.05)
        return found

    def run(self, *arguments: str) -> str:
        """Run a command and return its output.

        Raises:
            MeshFailed: it fails.
        """
        done = subprocess.run(
            [COTENANT, *arguments], env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise MeshFailed(f"cotenant {' '.join(arguments[:3])} …: {done.stderr.strip()[-1000:]}")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        """Run a command that prints JSON and return the value."""
        return json.loads(self.run(*arguments, "--json"))

    def submit(self, *arguments: str) -> str:
        """Submit a job and return its id."""
        return self.run("submit", *arguments).split()[0]

    def wait_for_end(self, job: str, seconds: float = SECONDS_MAX) -> dict[str, Any]:
        """Wait until a job has ended, and return what `cotenant show --json` prints of it."""

        def ended() -> dict[str, Any]:
            view: dict[str, Any] = self.json("show", job)
            return view if view["end_time"] else {}

        return self.until(ended, f"the end of job {job}", seconds)

    def sample(self) -> dict[str, pb.AttemptSample]:
        """Wait for the next window and return its sample of each job."""

        def newest() -> list[pb.NodeSample]:
            samples = self._contention.ListSamples(pb.ListSamplesRequest(), metadata=self._token).samples
            return [sample for sample in samples if sample.time.ToNanoseconds() / 1e9 > self._last][:1]

        (sample,) = self.until(newest, "a sample of the agent")
        self._last = sample.time.ToNanoseconds() / 1e9
        return {attempt.job_id: attempt for attempt in sample.attempts}

    def incidents(self) -> list[pb.Incident]:
        """Return the latest incidents, also trials."""
        response = self._contention.ListIncidents(pb.ListIncidentsRequest(page_size=100), metadata=self._token)
        return list(response.incidents)
