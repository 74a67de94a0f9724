"""The process that runs the load, as the driver sees it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading

from tests.verification.chaos.mesh import Mesh
from tests.verification.chaos.plan import CLIENT

POLL_SECONDS = 0.02


class LoadProcess:
    """The load process."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        command = [
            *mesh.machines.all[CLIENT].prefix,
            sys.executable,
            "-m",
            "tests.verification.chaos.load",
            str(mesh.directory),
        ]
        with (mesh.directory / "logs" / "client.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, mesh.service_address("queue"), mesh.service_address("placement"), str(seed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=mesh.environment(CLIENT) | {"COTENANT_LOG": "error"},
                text=True,
            )
        self.refusals: dict[str, int] = {}
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)

    def send(self, word: str) -> None:
        """Send a command."""
        assert self._process.stdin
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def is_idle(self) -> bool:
        """Return whether all submitted jobs have ended since the `hush` command."""
        with contextlib.suppress(queue.Empty):
            self.refusals = json.loads(self._lines.get(timeout=POLL_SECONDS))["refusals"]
            return True
        return False

    @property
    def pid(self) -> int:
        """Return its process ID."""
        return self._process.pid

    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
