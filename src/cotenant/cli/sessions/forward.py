"""`cotenant forward`: reach a port of a running job from this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Coroutine
from typing import Annotated, Any

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, command_error, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import find_job, phase_of
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.validation import REPLICAS_MAX
from cotenant.deferred import asyncio, grpc
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import GetJobRequest, GetJobResponse
from cotenant.v1.session_pb2 import ForwardSession, SessionStart

PORT_MAX = 65_535
LOOK_SECONDS = 2.0  # between two looks at whether the job has ended
LOOPBACK = "127.0.0.1"
WAITING_MAX = 128  # connections that were not accepted yet
GONE = frozenset({"JOB_NOT_RUNNING", "JOB_NOT_FOUND"})
JOB_ENDED = "JOB_ENDED"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("forward")(forward)


def forward(
    context: typer.Context,
    job_id: options.JobId,
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="PORT[:LOCAL]...",
            help="Ports of the job, each with the local port if that is another; 0 takes any free one.",
            show_default=False,
        ),
    ],
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=REPLICAS_MAX - 1, help="The replica; default: the first.")
    ] = None,
    bind: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="The local address; any but loopback lets other machines in."),
    ] = LOOPBACK,
) -> None:
    """Forward local ports to a running job until Ctrl-C, or until the job ends.

    The connections are made by the agent of the job's node, to a port on that node's loopback address. They go through
    the mesh, so they need no open ports on the nodes, and only who may change the job may connect.

    \b
    Examples:
      cotenant forward ID 6006
      cotenant forward ID 8888:9999 6006
      cotenant forward ID --rank 3 29500:0
    """
    wanted = [_parsed(text) for text in ports]
    try:
        ipaddress.ip_address(bind)
    except ValueError:
        raise usage_error(f"--bind: {bind!r} is not an IP address") from None
    with_mesh(Flags.of(context), lambda mesh: _forward(mesh, job_id, rank, wanted, bind))


def _parsed(text: str) -> tuple[int, int]:
    """Return the job's port and the local one."""
    remote, colon, local = text.partition(":")
    numbers = [remote, local if colon else remote]
    if not all(number.isdecimal() and int(number) <= PORT_MAX for number in numbers) or not int(remote):
        raise usage_error(f"invalid port {text!r}: name PORT or PORT:LOCAL, such as 8888 or 8888:9999")
    return int(numbers[0]), int(numbers[1])


async def _forward(mesh: Mesh, text: str, rank: int | None, ports: list[tuple[int, int]], bind: str) -> None:
    job = await find_job(mesh, text)
    _check_not_ended(job)
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watching: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    forwarders: list[Forwarder] = []
    try:
        for port, local in ports:
            start = SessionStart(id=job.id, rank=rank, forward=ForwardSession(port=port))
            forwarders.append(Forwarder(mesh, start, listen(bind, local), over))
        for one in forwarders:
            one.open()
            print(one.line, flush=True)
        watching = asyncio.ensure_future(_until_ended(mesh, job.id))
        await asyncio.wait((over, watching), return_when=asyncio.FIRST_COMPLETED)
        for ended in (over, watching):
            if ended.done():
                ended.result()
    finally:
        watching.cancel()
        for one in forwarders:
            await one.close()


async def _until_ended(mesh: Mesh, job_id: str) -> None:
    """Return never; a mesh that cannot be reached for a while does not end the forwarding.

    Raises:
        CommandError: the job has ended.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        with contextlib.suppress(grpc.aio.AioRpcError):
            response: GetJobResponse = await mesh.jobs.GetJob(GetJobRequest(id=job_id))
            _check_not_ended(response.job)


def _check_not_ended(job: Job) -> None:
    if (phase := phase_of(job)) in ENDED:
        raise CommandError(f"job {job.id} has ended: it {'was cancelled' if phase == Phase.CANCELLED else phase}")


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a local port.

    Raises:
        CommandError: it cannot.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        listening.listen(WAITING_MAX)
    except OSError as error:
        listening.close()
        raise CommandError(
            f"cannot listen on {address}, port {port}: {error.strerror}", hint="name another local port: PORT:LOCAL"
        ) from None
    return listening


class Forwarder:
    """One local port: each connection is a session of its own."""

    def __init__(self, mesh: Mesh, start: SessionStart, listening: socket.socket, over: asyncio.Future[None]) -> None:
        self._mesh, self._start, self._listening, self._over = mesh, start, listening, over
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Accept connections from now on."""
        self._track(self._accept())

    @property
    def line(self) -> str:
        """Return what is connected to what, on one line."""
        address, port = self._listening.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        return f"{shown}:{port} -> {self._start.id}:{self._start.forward.port}"

    @property
    def local_port(self) -> int:
        """Return the local port."""
        return int(self._listening.getsockname()[1])

    def lead_to(self, port: int) -> None:
        """Connect to another port of the job from now on."""
        self._start.forward.port = port

    async def _accept(self) -> None:
        while True:
            connected, _ = await asyncio.get_running_loop().sock_accept(self._listening)
            self._track(self._carry(connected))

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._over.done():
            self._over.set_exception(error)

    async def _carry(self, connected: socket.socket) -> None:
        """Carry a connection; that nothing listens on the port is not the end of the others."""
        from cotenant.cli.sessions.session_call import INPUT, OUTPUT, carry
        from cotenant.rpc.descriptors import DescriptorSource, SocketSink
        from cotenant.rpc.session_peer import SessionPeer

        connected.setblocking(False)
        start = SessionStart()
        start.CopyFrom(self._start)
        try:
            peer = SessionPeer({INPUT: DescriptorSource(connected.fileno())}, {OUTPUT: SocketSink(connected)})
            end = await carry(self._mesh, start, peer)
        except grpc.aio.AioRpcError as error:
            problem = from_error(error)
            if problem.reason in GONE:
                raise command_error(problem) from None
            note(f"a connection was refused: {command_error(problem).message}")
        else:
            if end.reason == JOB_ENDED:
                raise CommandError(end.error)
            if end.error:
                note(f"a connection was refused: {end.error}")
        finally:
            connected.close()

    async def close(self) -> None:
        """Close the port and all connections."""
        self._listening.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
