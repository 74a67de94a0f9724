"""`cotenant exec`: run a command inside a running job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import TAIL, Flags
from cotenant.cli.name_lookup import find_job
from cotenant.cli.outcome import Exit, usage_error
from cotenant.core.model.validation import REPLICAS_MAX
from cotenant.deferred import asyncio
from cotenant.v1.session_pb2 import ExecSession, SessionEnd, SessionFrame, SessionStart

if TYPE_CHECKING:
    from cotenant.rpc.session_peer import Sink, Source, Stream


def register(app: typer.Typer) -> None:
    """Add the command."""
    from cotenant.cli.lazy import TailCommand  # derived from typer's

    app.command("exec", cls=TailCommand)(exec_command)


def exec_command(
    context: typer.Context,
    job_id: options.JobId,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=REPLICAS_MAX - 1, help="The replica; default: the first.")
    ] = None,
    interactive: Annotated[
        bool | None, typer.Option("--stdin/--no-stdin", "-i", help="Pass on this command's input; the default.")
    ] = None,
    tty: Annotated[
        bool | None,
        typer.Option("--tty/--no-tty", "-t/-T", help="Run on a terminal; default: if this command's input is one."),
    ] = None,
) -> None:
    """Run a command inside a running job: your shell, unless another is given after `--`.

    It runs where the job's process runs: in its control groups and namespaces, with its user, environment and
    directory. So it has the job's cores, memory and GPUs, and what it uses counts as the job's. It ends with the job,
    and with this command: all that it started is killed.

    The exit code is that of the command; 128 and the signal's number if a signal ended it.

    \b
    Examples:
      cotenant exec ID
      cotenant exec ID -- nvidia-smi
      cotenant exec ID --rank 3 -- py-spy dump --pid 12
      cotenant exec ID --no-tty -- tar c checkpoints > checkpoints.tar
      cotenant exec ID -- sh -c 'cat > config.yaml' < config.yaml
    """
    on_terminal = sys.stdin.isatty() if tty is None else tty
    with_input = interactive is not False
    if on_terminal and not with_input:
        raise usage_error("--tty needs the input: leave out --no-stdin, or add --no-tty")
    words = context.meta.get(TAIL) or []
    code = with_mesh(Flags.of(context), lambda mesh: _exec(mesh, job_id, rank, words, on_terminal, with_input))
    raise Exit(code)


async def _exec(mesh: Mesh, text: str, rank: int | None, words: list[str], on_terminal: bool, with_input: bool) -> int:
    job = await find_job(mesh, text)
    start = SessionStart(id=job.id, rank=rank, exec=ExecSession(command=words))
    return await run_session(mesh, start, on_terminal=on_terminal, with_input=with_input)


async def run_session(mesh: Mesh, start: SessionStart, *, on_terminal: bool, with_input: bool) -> int:
    """Run a session that takes this command's place; return its exit code."""
    from cotenant.cli.sessions.session_call import exit_code_of, own_streams

    streams = own_streams(with_input=with_input)
    return exit_code_of(await carry_on_terminal(mesh, start, *streams, on_terminal=on_terminal))


async def carry_on_terminal(
    mesh: Mesh,
    start: SessionStart,
    sources: Mapping[Stream, Source],
    sinks: Mapping[Stream, Sink],
    *,
    on_terminal: bool,
) -> SessionEnd:
    """Carry a session to its end, on this command's terminal if `on_terminal`; return how it ended."""
    from cotenant.cli.sessions.session_call import carry
    from cotenant.cli.sessions.terminal import raw_terminal, terminal_size
    from cotenant.rpc.session_peer import SessionPeer

    descriptor = sys.stdin.fileno()
    peer = SessionPeer(sources, sinks)
    resizing: set[asyncio.Task[None]] = set()

    def resized() -> None:
        task = asyncio.ensure_future(peer.send(SessionFrame(terminal=terminal_size(descriptor))))
        resizing.add(task)
        task.add_done_callback(resizing.discard)

    if on_terminal:
        start.exec.terminal.CopyFrom(terminal_size(descriptor))
        start.exec.terminal_type = os.environ.get("TERM", "")
    raw = raw_terminal(descriptor, resized) if on_terminal and sys.stdin.isatty() else nullcontext()
    with raw:
        return await carry(mesh, start, peer)
