"""The process of the dashboard: `up` listens for it, and starts it when the first page is opened.

It is a process of its own, so that pages never delay the scheduler, and it costs nothing until somebody opens one.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotenant import telemetry
from cotenant.cli.mesh import login_links
from cotenant.cli.outcome import CommandError

log = telemetry.logger()

MODULE = "cotenant.web"
BACKLOG = 128
END_SECONDS_MAX = 5.0
RESTART_SECONDS = 1.0
NOT_INHERITED = ("NOTIFY_SOCKET",)  # systemd waits for `up`
NO_TLS: Mapping[str, str] = {}


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 is a free one.

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
        raise CommandError(
            f"the dashboard cannot listen on {host}:{port}: {reason}", hint="choose another --web-port, or --no-web"
        ) from None
    return listening


def command(settings: Mapping[str, Any]) -> list[str]:
    """Return the command of the process; see `cotenant.web.__main__` for its settings."""
    return [sys.executable, "-P", "-m", MODULE, json.dumps(settings)]


class Dashboard:
    """The dashboard of `up`: a socket, and while pages are open the process that serves it."""

    def __init__(self, state_dir: Path, port: int, tls: Mapping[str, str] = NO_TLS) -> None:
        self._state_dir = state_dir
        self._socket = bind("127.0.0.1", port)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._start)

    def link(self) -> str:
        """Return a new link that logs in once."""
        return f"http://127.0.0.1:{self.port}/login?token={login_links.mint(self._state_dir)}"

    def _start(self) -> None:
        """Start the process, which accepts the connection that has come."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        settings = {"fd": self._socket.fileno(), "state_dir": str(self._state_dir), "parent": True, **self._tls}
        self._process = subprocess.Popen(
            command(settings),
            stdin=subprocess.PIPE,  # it ends when this closes, with `up`
            pass_fds=[self._socket.fileno()],
            env={name: value for name, value in os.environ.items() if name not in NOT_INHERITED},
            start_new_session=True,
        )
        self._waiting = asyncio.create_task(self._restart(self._process))

    async def _restart(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has exited, and start it again for the next page."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        log.warning("dashboard_exited", code=process.wait())
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
