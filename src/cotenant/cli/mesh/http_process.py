"""A process that serves HTTP: `up` listens for it, and starts it when the first connection comes.

It is a process of its own, so that its requests never delay the scheduler, and it costs nothing until the first one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from cotenant import telemetry
from cotenant.cli.outcome import CommandError

log = telemetry.logger()

BACKLOG = 128
END_SECONDS_MAX = 5.0
RESTART_SECONDS = 1.0
NOT_INHERITED = ("NOTIFY_SOCKET",)  # systemd waits for `up`


def bind(what: str, host: str, port: int, hint: str) -> socket.socket:
    """Return a socket that listens there; port 0 is a free one. `hint` says what to do if that fails.

    Raises:
        CommandError: the address is in use or cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{what} cannot listen on {host}:{port}: {reason}", hint=hint) from None
    return listening


def command(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the command of the process; the module says what its settings are."""
    return [sys.executable, "-P", "-m", module, json.dumps(settings)]


class HttpProcess:
    """A socket, and the process that serves it once somebody has connected."""

    def __init__(self, module: str, listening: socket.socket, settings: Mapping[str, Any]) -> None:
        self._module, self._socket, self._settings = module, listening, settings
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._start)

    def _start(self) -> None:
        """Start the process, which accepts the connection that has come."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        settings = {**self._settings, "fd": self._socket.fileno(), "parent": True}
        self._process = subprocess.Popen(
            command(self._module, settings),
            stdin=subprocess.PIPE,  # it ends when this closes, with `up`
            pass_fds=[self._socket.fileno()],
            env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED},
            start_new_session=True,
        )
        self._waiting = asyncio.create_task(self._restart(self._process))

    async def _restart(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has exited, and start it again for the next connection."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        log.warning("http_process_exited", module=self._module, code=process.wait())
        await asyncio.sleep(RESTART_SECONDS)
        loop.add_reader(self._socket.fileno(), self._start)

    async def close(self) -> None:
        """End the process; jobs and the mesh are not affected."""
        if self._waiting:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        if self._process and self._process.poll() is None:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
