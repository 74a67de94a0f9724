"""Interactive jobs: a job whose command is the holder, and the client that stays with it until it has ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from cotenant.cli import units
from cotenant.cli.connection import Mesh, command_error, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.default_targets import with_default_targets
from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.jobs.job_lines import outcome_line, phase_line
from cotenant.cli.jobs.job_options import read_drafts
from cotenant.cli.jobs.submit import submit_steps, upload_folders
from cotenant.cli.jobs.submit_directory import current_directory
from cotenant.cli.jobs.submit_order import order_steps
from cotenant.cli.jobs.user_defaults import read_user_defaults
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import CommandError, Exit, ExitCode, note, sanitize, usage_error
from cotenant.cli.sessions.held_command import ATTACH, PYTHON, source
from cotenant.cli.sessions.holder import EXIT_REPLACED
from cotenant.cli.source_positions import MapNode
from cotenant.cli.watch import job_changes
from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.deferred import asyncio, grpc
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import CancelJobRequest, ExplainJobRequest, ExplainJobResponse
from cotenant.v1.session_pb2 import ExecSession, SessionEnd, SessionStart

IDLE_DEFAULT = "30m"
OUTLOOK_SECONDS = 5.0  # between two looks at when a waiting job will start
ATTACH_DELAYS_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)
CANCEL_SECONDS_MAX = 5.0  # for the mesh to take the end of a job whose terminal is gone
SIGNALLED = 128  # plus the signal: what a shell reports
NOT_STARTED_MAX = 3  # sessions that the node refuses while the job runs
HANG_UPS = (signal.SIGTERM, signal.SIGHUP)


def parse_idle(text: str) -> float:
    """Return the seconds of `--idle`."""
    try:
        return units.parse_seconds(text)
    except ValueError as error:
        raise usage_error(f"--idle {error}") from None


def interactive_draft(job: MapNode, command: Callable[[Sequence[str]], tuple[str, ...]], name: str = "") -> Draft:
    """Return the job that options describe, with its command replaced; its name is that of the program.

    Raises:
        CommandError: it would have several processes.
    """
    [draft] = read_drafts([], job, time.time())
    spec = draft.spec
    if spec.array or any(role.replicas > 1 for role in spec.roles):
        raise usage_error(
            "an interactive job has one process", hint="several replicas and arrays: cotenant submit --follow"
        )
    named = spec.name or name or os.path.basename(spec.command[0])
    draft = replace(draft, spec=replace(spec, name=named, command=command(spec.command)))
    draft = draft.submitted_from(current_directory(os.environ), os.environ)
    [draft] = with_default_targets([draft], read_user_defaults(os.environ))
    return draft


def submit_and_stay(flags: Flags, draft: Draft, attach: Attach) -> int:
    """Submit an interactive job and stay with it; return its exit code."""
    drafts = upload_folders(flags, [draft], False)

    async def work(mesh: Mesh) -> int:
        accepted: list[Job | Array] = []
        await submit_steps(mesh, order_steps(drafts), "", False, accepted)
        [job] = accepted
        assert isinstance(job, Job)
        note(f"submitted {job.id} {job.spec.name}".rstrip())
        return await stay(mesh, job, attach)

    return with_mesh(flags, work)


class Attach(Protocol):
    """Connects this command to a running interactive job."""

    async def __call__(self, mesh: Mesh, start: SessionStart) -> SessionEnd:
        """Carry a session of the holder's client to its end."""

    def kill(self) -> None:
        """End the program at once, if that is possible."""


async def stay(mesh: Mesh, job: Job, attach: Attach) -> int:
    """Stay with an interactive job until it has ended, and end it with this command; return its exit code.

    Raises:
        CommandError: the connection to the mesh stayed lost, or another client has taken over: the job goes on.
        Exit: this command was told to end.
    """
    staying = _Stay(mesh, job, attach)
    staying.catch_signals()
    following = asyncio.create_task(staying.follow(), name="follow-job")
    try:
        return _exit_code(await staying.until_ended(), staying.interrupts)
    except CommandError:
        raise
    except grpc.aio.AioRpcError as error:
        problem = command_error(from_error(error))
        raise CommandError(
            f"lost the connection to job {job.id}: {problem.message}",
            hint=f"it ends when it has had no client for a while; join it again with: cotenant attach {job.id}",
            code=problem.code,
        ) from None
    except asyncio.CancelledError:
        await staying.end_job()
        by = staying.hang_up or (signal.SIGINT if staying.interrupts else signal.SIGTERM)  # a raw terminal keeps which
        raise Exit(SIGNALLED + by) from None
    except BaseException:  # the reader of the output is gone
        await staying.end_job()
        raise
    finally:
        staying.line.clear()
        following.cancel()
        staying.forget_signals()


class _Stay:
    """A job as it changes, and what the user wants of it."""

    def __init__(self, mesh: Mesh, job: Job, attach: Attach) -> None:
        self.mesh, self.job, self._attach = mesh, job, attach
        self.line = StatusLine()
        self.interrupts = self.hang_up = 0
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None
        self._explained, self._explain_at = ExplainJobResponse(), 0.0  # why it waits, and when to ask again
        self._attached = False
        self._failures = 0  # sessions that failed one after the other
        self._main = asyncio.current_task()
        self._cancelling: set[asyncio.Task[None]] = set()

    # Signals -------------------------------------------------------------------------------------------------

    def catch_signals(self) -> None:
        """Let Ctrl-C cancel the job, and SIGTERM or a closed terminal end it and this command."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        for number in HANG_UPS:
            loop.add_signal_handler(number, self._hung_up, number)

    def forget_signals(self) -> None:
        """Undo `catch_signals`."""
        for number in (signal.SIGINT, *HANG_UPS):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _interrupted(self) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self.line.clear()
            note(f"cancelling {self.job.id}; press Ctrl-C again to end it at once")
            task = asyncio.create_task(self._cancel())
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
        elif self._attached and self.interrupts == 2:
            self._attach.kill()
        elif self._main is not None:
            self._main.cancel()

    def _hung_up(self, number: int) -> None:
        self.hang_up = number
        if self._main is not None:
            self._main.cancel()

    async def _cancel(self) -> None:
        try:
            await self.mesh.jobs.CancelJob(CancelJobRequest(id=self.job.id))
        except grpc.aio.AioRpcError as error:
            note(f"cannot cancel {self.job.id}: {command_error(from_error(error)).message}")

    async def end_job(self) -> None:
        """Cancel the job because this command ends; what cannot be done in a few seconds is not waited for."""
        if self._main is not None:
            self._main.uncancel()
        with suppress(TimeoutError, OSError):  # OSError: of a terminal that is gone
            async with asyncio.timeout(CANCEL_SECONDS_MAX):
                await self._cancel()

    # Changes of the job --------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep the job up to date until it has ended."""
        try:
            async for job in job_changes(self.mesh, [self.job.id]):
                self.job = job
                self._changed.set()
        except BaseException as error:  # raised where it is waited for
            self._failed = error
        else:
            if phase_of(self.job) not in ENDED:
                self._failed = CommandError(f"the queue no longer reports {self.job.id}")
        self._changed.set()

    async def _next_change(self, seconds: float | None = None) -> None:
        """Wait until the job has changed, for some seconds at most."""
        if self._failed is not None and phase_of(self.job) not in ENDED:
            raise self._failed
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
                self._changed.clear()

    async def until_ended(self) -> Job:
        """Attach whenever the job runs, until it has ended; return it."""
        while phase_of(self.job) not in ENDED:
            if phase_of(self.job) == Phase.RUNNING:
                self.line.clear()
                await self._attach_once()
            else:
                await self._show_wait()
        return self.job

    async def _show_wait(self) -> None:
        """Show why the job waits and when it will probably start, until that changes."""
        phase, outlook = phase_line(self.job), ""
        if phase_of(self.job) == Phase.QUEUED:
            if time.monotonic() >= self._explain_at:
                self._explain_at = time.monotonic() + OUTLOOK_SECONDS
                with suppress(grpc.aio.AioRpcError):
                    self._explained = await self.mesh.jobs.ExplainJob(ExplainJobRequest(id=self.job.id))
            outlook = f"; {self._explained.outlook}" if self._explained.outlook else ""
            if phase_of(self._explained.job) == Phase.QUEUED:
                phase = phase_line(self._explained.job)  # has the reason of the last cycle
        self.line.show(f"{self.job.id} {phase}", outlook)
        await self._next_change(OUTLOOK_SECONDS)

    async def _attach_once(self) -> None:
        number, self._attached = self.job.attempt.number, True
        start = SessionStart(id=self.job.id, exec=ExecSession(command=[*PYTHON, source("holder"), ATTACH]))
        try:
            end = await self._attach(self.mesh, start)
        except grpc.aio.AioRpcError as error:
            problem = from_error(error)
            if problem.code.name not in ("UNAVAILABLE", "CANCELLED", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"):
                raise command_error(problem) from None
            await self._session_failed(number, command_error(problem).message)
        except CommandError as error:
            await self._session_failed(number, error.message)
        else:
            await self._session_ended(number, end)
        finally:
            self._attached = False
            self.catch_signals()  # a terminal had its own

    async def _session_ended(self, number: int, end: SessionEnd) -> None:
        if end.code == EXIT_REPLACED:
            raise CommandError(f"another client has attached to job {self.job.id}; it goes on there")
        if end.error == "" and not end.code and not end.signal:
            self._failures = 0
            while self._runs(number):  # the program has ended, and the job is about to
                await self._next_change()
            return
        if end.reason == "SESSION_NOT_STARTED" and self._failures >= NOT_STARTED_MAX:
            raise CommandError(f"cannot attach to job {self.job.id}: {end.error}")
        await self._session_failed(number, end.error or "the session was lost")

    async def _session_failed(self, number: int, message: str) -> None:
        """Wait before the next attempt to attach, unless the job changes."""
        delay = ATTACH_DELAYS_SECONDS[min(self._failures, len(ATTACH_DELAYS_SECONDS) - 1)]
        self._failures += 1
        deadline = time.monotonic() + delay
        while self._runs(number) and (left := deadline - time.monotonic()) > 0:
            await self._next_change(left)
        if self._runs(number) and self._failures == 2:
            note(f"{message}; attaching again")

    def _runs(self, number: int) -> bool:
        return phase_of(self.job) == Phase.RUNNING and self.job.attempt.number == number


class StatusLine:
    """A line on stderr: kept up to date in place on a terminal, otherwise printed again when it changes."""

    def __init__(self) -> None:
        self._shown = ""
        self._in_place = sys.stderr.isatty()

    def show(self, text: str, detail: str) -> None:
        """Show a text; a change of the detail alone is shown in place only."""
        if self._in_place:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            print(f"\r\x1b[2K{sanitize(text + detail)[: columns - 1]}", end="", file=sys.stderr, flush=True)
        elif text != self._shown:
            note(text + detail)
        self._shown = text

    def clear(self) -> None:
        """Remove the line, to make room for others."""
        if self._in_place and self._shown:
            with suppress(OSError):
                print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._shown = ""


def _exit_code(job: Job, interrupts: int) -> int:
    """Return the exit code of a job that has ended; print how it ended if the program's own code does not say."""
    phase, status = phase_of(job), job.attempt.exit
    if phase == Phase.SUCCEEDED:
        return ExitCode.DONE
    if phase == Phase.CANCELLED:
        note(f"job {job.id} was cancelled")
        return ExitCode.INTERRUPTED if interrupts else ExitCode.FAILED
    by_itself = job.attempt.HasField("exit") and not (job.attempt.stop_reason or job.attempt.HasField("launch_failure"))
    if not by_itself or status.out_of_memory:
        note(f"job {job.id} {outcome_line(job)}")
    return (SIGNALLED + status.signal if status.signal else status.code) or ExitCode.FAILED
