"""`cotenant notebook`: JupyterLab in a job, reached from this machine."""

from __future__ import annotations

import json
import secrets
import socket
from collections import deque
from collections.abc import Callable
from typing import Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh
from cotenant.cli.flags import TAIL, Flags
from cotenant.cli.jobs.job_options import THE_COMMAND_LINE, with_job_options
from cotenant.cli.outcome import CommandError, Exit, note
from cotenant.cli.sessions.forward import LOOPBACK, PORT_MAX, Forwarder, listen
from cotenant.cli.sessions.held_command import PYTHON, held, source
from cotenant.cli.sessions.interactive_job import (
    IDLE_DEFAULT,
    interactive_draft,
    parse_idle,
    submit_and_stay,
)
from cotenant.cli.sessions.notebook_server import READY
from cotenant.cli.source_positions import ListNode, MapNode, ScalarNode
from cotenant.deferred import asyncio
from cotenant.v1.session_pb2 import ForwardSession, SessionEnd, SessionStart

PORT_DEFAULT = 8888
LINES_SHOWN_MAX = 20
NAME = "notebook"
INSTALL_HINT = "JupyterLab has to be in the job's Python environment: pip install jupyterlab"


def register(app: typer.Typer) -> None:
    """Add the command."""
    from cotenant.cli.lazy import TailCommand  # derived from typer's

    app.command("notebook", cls=TailCommand)(with_job_options(notebook))


def notebook(
    context: typer.Context,
    job: MapNode,
    port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=0, max=PORT_MAX, help="The local port; default: 8888, or a free one."),
    ] = None,
    idle: Annotated[
        str, typer.Option(metavar="DURATION", help="End the job after this long without a client, if that was lost.")
    ] = IDLE_DEFAULT,
    as_json: options.AsJson = False,
) -> None:
    """Run JupyterLab in a job, and print the URL at which this machine reaches it.

    It is the JupyterLab of your Python environment, with the job's GPUs, cores and memory. Only this machine reaches
    it, and only with the token in the URL, which no command line, environment or log shows. Words after `--` are
    passed to `jupyter lab`.

    The job ends with this command: with Ctrl-C, when it is terminated, or when its terminal is closed. Save first. If
    the connection is lost, it runs on for the time of --idle, and this command connects again as soon as it can.

    \b
    Examples:
      cotenant notebook --gpus 1
      cotenant notebook --gpus 1 --cpus 8 --memory 32GiB --time 8h --port 9999
      cotenant notebook --cpus 2 -- --notebook-dir=experiments
    """
    idle_seconds = parse_idle(idle)
    arguments = context.meta.get(TAIL) or []
    words = (*PYTHON, source("notebook_server"), *arguments)
    entries = [one for one in job.entries if one[0].text != "command"]
    command = ListNode(THE_COMMAND_LINE, tuple(ScalarNode(THE_COMMAND_LINE, word) for word in words))
    job = MapNode(job.place, (*entries, (ScalarNode(THE_COMMAND_LINE, "command"), command)))
    draft = interactive_draft(job, lambda given: held(given, idle_seconds, terminal=False, with_input=True), NAME)
    attached = _Notebook(port, as_json)
    code = submit_and_stay(Flags.of(context), draft, attached)
    if not attached.served and code:
        attached.explain()
    raise Exit(code)


class _Notebook:
    """The connection to JupyterLab: its token, its port, and the local port."""

    def __init__(self, port: int | None, as_json: bool) -> None:
        self._local, self._as_json = port, as_json
        self._token = secrets.token_hex(24)
        self._said: deque[str] = deque(maxlen=LINES_SHOWN_MAX)
        self._forwarder: Forwarder | None = None
        self.served = False

    async def __call__(self, mesh: Mesh, start: SessionStart) -> SessionEnd:
        """Carry a session with the program that starts JupyterLab."""
        from cotenant.cli.sessions.session_call import ERROR, INPUT, OUTPUT, carry
        from cotenant.rpc.session_peer import SessionPeer

        def line(text: str) -> None:
            self._said.append(text)
            if text.startswith(READY):
                self._ready(mesh, start.id, int(text.removeprefix(READY)))

        sinks = {OUTPUT: _Lines(line), ERROR: _Lines(self._said.append)}
        return await carry(mesh, start, SessionPeer({INPUT: _Once(f"{self._token}\n".encode())}, sinks))

    def kill(self) -> None:
        """Do nothing: JupyterLab ends by itself when its job is cancelled."""

    def _ready(self, mesh: Mesh, job_id: str, port: int) -> None:
        """Forward the local port to this port of the job, and print the URL once."""
        if self._forwarder is not None:  # the job was started again
            self._forwarder.lead_to(port)
            return
        start = SessionStart(id=job_id, forward=ForwardSession(port=port))
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forwarder = Forwarder(mesh, start, self._listen(), over)
        self._forwarder.open()
        self.served = True
        url = f"http://{LOOPBACK}:{self._forwarder.local_port}/lab?token={self._token}"
        if self._as_json:
            print(json.dumps({"id": job_id, "url": url}), flush=True)
        else:
            print(url, flush=True)
            note("Ctrl-C ends the job")

    def _listen(self) -> socket.socket:
        if self._local is not None:
            return listen(LOOPBACK, self._local)
        try:
            return listen(LOOPBACK, PORT_DEFAULT)
        except CommandError:
            return listen(LOOPBACK, 0)

    def explain(self) -> None:
        """Print what was said by a JupyterLab that did not start, and what to do."""
        for text in self._said:
            note(f"  {text}")
        note(f"hint: {INSTALL_HINT}")


class _Once:
    """A source that sends some bytes, and then nothing."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def ready(self) -> None:
        """Wait until there is something to send."""
        if not self._data:
            await asyncio.get_running_loop().create_future()

    def read(self, most: int) -> bytes | None:
        """Return some of the bytes."""
        data, self._data = self._data[:most], self._data[most:]
        return data


class _Lines:
    """A sink that passes on lines."""

    def __init__(self, line: Callable[[str], object]) -> None:
        self._line, self._begun = line, b""

    async def write(self, data: bytes) -> bool:
        """Pass on the lines that are complete."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for one in lines:
            self._line(one.decode(errors="replace"))
        return True

    def close(self) -> None:
        """Pass on what is left."""
        if self._begun:
            self._line(self._begun.decode(errors="replace"))
