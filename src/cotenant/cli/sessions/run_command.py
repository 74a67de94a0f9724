"""`cotenant run` and `cotenant attach`: a program in a job of its own, and this terminal with it."""

from __future__ import annotations

import sys
from typing import Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_options import with_job_options
from cotenant.cli.name_lookup import find_job, phase_of
from cotenant.cli.outcome import CommandError, Exit, usage_error
from cotenant.cli.sessions.held_command import Held, held
from cotenant.cli.sessions.interactive_job import (
    IDLE_DEFAULT,
    interactive_draft,
    parse_idle,
    stay,
    submit_and_stay,
)
from cotenant.cli.source_positions import MapNode
from cotenant.core.model.lifecycle import ENDED
from cotenant.deferred import asyncio
from cotenant.v1.session_pb2 import SessionEnd, SessionStart


def register(app: typer.Typer) -> None:
    """Add the commands."""
    from cotenant.cli.lazy import TailCommand  # derived from typer's

    app.command("run", cls=TailCommand)(with_job_options(run))
    app.command("attach")(attach)


def run(
    context: typer.Context,
    job: MapNode,
    interactive: Annotated[bool, typer.Option("--stdin", "-i", help="Pass on this command's input.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Run on a terminal; implies --stdin.")] = False,
    idle: Annotated[
        str, typer.Option(metavar="DURATION", help="End the job after this long without a client, if that was lost.")
    ] = IDLE_DEFAULT,
) -> None:
    """Run a program in a job and stay with it: its output is printed here, and its exit code is this command's.

    While the job waits, one line says why and when it will probably start. With -it the program runs on a terminal,
    which is this one: keys, Ctrl-C and changes of the window go to it. Without, it has no input, and Ctrl-C cancels
    the job; twice ends it at once.

    The job ends with this command: when it is terminated, or its terminal is closed, the job is cancelled. If the
    connection is lost, the program runs on for the time of --idle, and this command attaches again as soon as it can;
    so does `cotenant attach ID`, on another machine too.

    \b
    Examples:
      cotenant run -it --gpus 1 -- bash
      cotenant run -it --gpus 1 --cpus 4 --memory 16GiB --time 2h -- python3
      cotenant run --gpus 1 -- python3 train.py --epochs 1
      cotenant run -i --cpus 1 -- sort < words > sorted
    """
    idle_seconds = parse_idle(idle)
    if tty and not sys.stdin.isatty():
        raise usage_error("-t needs a terminal, and the input is none", hint="leave out -t; -i passes on the input")
    draft = interactive_draft(job, lambda words: held(words, idle_seconds, terminal=tty, with_input=interactive or tty))
    raise Exit(submit_and_stay(Flags.of(context), draft, Terminal(tty, interactive or tty)))


def attach(context: typer.Context, job_id: options.JobId) -> None:
    """Rejoin a job of `cotenant run` after the connection was lost.

    It takes the place of another client that is still attached. From then on the job ends with this command, as it
    did with `run`.

    \b
    Example:
      cotenant attach ID
    """

    async def work(mesh: Mesh) -> int:
        job = await find_job(mesh, job_id)
        what = Held.of(job.spec.command)
        if what is None:
            raise CommandError(
                f"job {job.id} was not started by `cotenant run`",
                hint=f"its output: cotenant logs --follow {job.id}; a shell in it: cotenant exec {job.id}",
            )
        if (phase := phase_of(job)) in ENDED:
            raise CommandError(f"job {job.id} has ended: it is {phase}", hint=f"its output: cotenant logs {job.id}")
        if what.terminal and not sys.stdin.isatty():
            raise usage_error(f"job {job.id} runs on a terminal, and the input is none")
        return await stay(mesh, job, Terminal(what.terminal, what.with_input))

    raise Exit(with_mesh(Flags.of(context), work))


class KillSwitch:
    """The input of a program without input: one byte, which kills it."""

    def __init__(self, killed: asyncio.Event) -> None:
        self._killed = killed

    async def ready(self) -> None:
        """Wait until the program is to be killed."""
        await self._killed.wait()

    def read(self, most: int) -> bytes | None:
        """Return the byte."""
        from cotenant.cli.sessions.holder import KILL_NOW

        self._killed.clear()
        return KILL_NOW[:most]


class Terminal:
    """Connects this command's streams, or its terminal, to a held program."""

    def __init__(self, on_terminal: bool, with_input: bool) -> None:
        self._on_terminal, self._with_input = on_terminal, with_input
        self._killed: asyncio.Event | None = None

    async def __call__(self, mesh: Mesh, start: SessionStart) -> SessionEnd:
        """Carry a session in this command's place."""
        from cotenant.cli.sessions.exec_command import carry_on_terminal
        from cotenant.cli.sessions.session_call import INPUT, own_streams

        sources, sinks = own_streams(with_input=self._with_input, hangs_up=self._on_terminal)
        if not self._with_input:
            self._killed = asyncio.Event()
            sources = {INPUT: KillSwitch(self._killed)}
        return await carry_on_terminal(mesh, start, sources, sinks, on_terminal=self._on_terminal)

    def kill(self) -> None:
        """Kill a program without input."""
        if self._killed is not None:
            self._killed.set()
