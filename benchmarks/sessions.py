"""How long a key takes to be echoed by a session in a job, and how fast its streams are, on one machine.

The reference is an echo on a terminal of this process, without a mesh.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.local_mesh import COTENANT, LocalMesh, MeshFailed

SETTINGS = 'contention = "none"\n'
ECHO = ["sh", "-c", "stty -icanon; echo ready; exec cat > /dev/null"]  # the terminal echoes
KEYS, KEYS_QUICK = 1000, 200
PAUSE_SECONDS = 0.01  # a fast typist
LATENCY_MS = 10.0
MEBIBYTES = 32
SECONDS_MAX = 30.0


class Terminal:
    """A command on a terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, environment)

    def read_until(self, words: bytes) -> None:
        """Read up to these words."""
        said, deadline = b"", time.monotonic() + SECONDS_MAX
        while words not in said:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MeshFailed(f"the terminal printed {said!r} and not {words!r}")
            said += os.read(self._descriptor, 4096)

    def echo_ms(self) -> float:
        """Return how long a key takes to be echoed."""
        begin = time.perf_counter()
        os.write(self._descriptor, b"x")
        self.read_until(b"x")
        return (time.perf_counter() - begin) * 1e3

    def latencies_ms(self, count: int) -> list[float]:
        """Return the latency of each key."""
        self.read_until(b"ready\r\n")
        found = []
        for _ in range(count):
            found.append(self.echo_ms())
            time.sleep(PAUSE_SECONDS)
        return found

    def close(self) -> None:
        """Hang up, and wait for its end."""
        os.close(self._descriptor)
        os.waitpid(self.pid, 0)


def _latencies_ms(command: list[str], environment: dict[str, str], count: int) -> list[float]:
    terminal = Terminal(command, environment)
    try:
        return terminal.latencies_ms(count)
    finally:
        terminal.close()


def _seconds(command: list[str], environment: dict[str, str], data: bytes) -> float:
    """Return how long a command takes that echoes some data."""
    begin = time.perf_counter()
    done = subprocess.run(command, input=data, env=environment, capture_output=True, check=True)
    if done.stdout != data:
        raise MeshFailed("the data did not come back unchanged")
    return time.perf_counter() - begin


def measure(quick: bool) -> list[harness.Row]:
    """Measure one session with a terminal and one without."""
    count = KEYS_QUICK if quick else KEYS
    with tempfile.TemporaryDirectory() as directory:
        mesh = LocalMesh(Path(directory), SETTINGS)
        try:
            job = mesh.run("submit", "--cpus", "1", "--", "sleep", "3600").strip()
            mesh.until(lambda: mesh.json("show", job)["phase"] == "running", "the job")
            environment, session = dict(mesh.environment), [COTENANT, "exec", job]
            local = _latencies_ms(ECHO, environment, count)
            carried = _latencies_ms([*session, "-it", "--", *ECHO], environment, count)
            data = os.urandom(MEBIBYTES << 20)
            seconds = _seconds([*session, "--", "cat"], environment, data)
            plain = _seconds(["cat"], environment, data)
        finally:
            mesh.close()
    p50, reference = harness.percentile(carried, 50), harness.percentile(local, 50)
    return [
        harness.Row(
            "a key echoed by a session, p50", p50, "ms", reference, "a local terminal", f"≤ {LATENCY_MS:g} ms",
            p50 <= LATENCY_MS,
        ),
        harness.Row("a key echoed by a session, p95", harness.percentile(carried, 95), "ms"),
        harness.Row("data through a session and back", MEBIBYTES / seconds, "MiB/s", MEBIBYTES / plain, "cat"),
    ]  # fmt: skip


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
