"""The laws of the contract, in the order of the transcript: each drives the executor, and says how it broke the law."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.executor_check.scripted_placement import BEAT_SECONDS, Key, ScriptedPlacement, Stream, state_name
from cotenant.v1 import job_pb2, node_capabilities_pb2

if TYPE_CHECKING:
    from cotenant.executor_check.executor_process import ExecutorProcess

UNKNOWN_FIELD = bytes([0xC2, 0x3E, 3]) + b"new"  # field 1000, as a later release may send
GRACE_SECONDS = 1.0
LASTING = "check-run"  # runs from its law on until the last
CORES_MIN = 2
RUNNING, SUCCEEDED, FAILED = (
    job_pb2.ATTEMPT_STATE_RUNNING,
    job_pb2.ATTEMPT_STATE_SUCCEEDED,
    job_pb2.ATTEMPT_STATE_FAILED,
)
STOPPED, NOT_LAUNCHED = job_pb2.ATTEMPT_STATE_STOPPED, job_pb2.ATTEMPT_STATE_NOT_LAUNCHED
ENDED = (SUCCEEDED, FAILED, STOPPED, NOT_LAUNCHED)


class Broken(Exception):
    """A law does not hold; the message says what was sent, what was expected, and what came."""


@dataclass(slots=True)
class Script:
    """The transcript so far: the scripted placement, the executor's process, and a folder in which jobs leave notes."""

    placement: ScriptedPlacement
    process: ExecutorProcess
    folder: Path
    seconds_max: float
    epoch: int = 1000

    # What is sent ------------------------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        """Return an epoch newer than all before."""
        self.epoch += 1
        return self.epoch

    def assignment(self, job_id: str, script: str, *, number: int = 1, epoch: int = 0) -> agent_pb2.Assignment:
        """Return an assignment of one replica on one core; the script's first act is to note its process id.

        The job that runs through all laws is on the first core, the others are on the last, one after the other.
        """
        hello = self.hello
        core = hello.inventory.cores[0 if job_id == LASTING else -1]
        order = agent_pb2.Assignment(
            job_id=job_id,
            number=number,
            epoch=epoch or self.next_epoch(),
            world_size=1,
            master_address="127.0.0.1",
            master_port=29500,
        )
        order.spec.name = job_id
        order.spec.command.extend(["/bin/sh", "-c", f"echo $$ >> {self.notes(job_id)}; {script}"])
        order.spec.grace.FromMilliseconds(round(GRACE_SECONDS * 1000))
        order.spec.roles.add(name="worker", replicas=1).resources.cores = 1
        order.allocation.node_id = hello.node_id
        order.allocation.tasks.add(
            role="worker", core_ids=[core.id], cpu_ids=core.cpus, memory_nodes=[max(0, core.numa_node)]
        )
        return order

    def assign(self, order: agent_pb2.Assignment) -> Key:
        """Send an assignment, and return the key of its attempt."""
        self.placement.send(agent_pb2.ConnectResponse(assignments=[order]))
        return order.job_id, order.number

    def stop(self, key: Key, epoch: int, grace_seconds: float = GRACE_SECONDS) -> None:
        """Send an order to stop an attempt."""
        message = agent_pb2.ConnectResponse()
        order = message.stops.add(job_id=key[0], number=key[1], epoch=epoch, reason=job_pb2.STOP_REASON_CANCELLED)
        order.grace.FromMilliseconds(round(grace_seconds * 1000))
        self.placement.send(message)

    def acknowledge(self, key: Key) -> None:
        """Send the acknowledgment of an attempt's end."""
        message = agent_pb2.ConnectResponse()
        message.acks.add(job_id=key[0], number=key[1])
        self.placement.send(message)

    # What comes --------------------------------------------------------------------------------------------------

    @property
    def hello(self) -> agent_pb2.Hello:
        """The hello of the open stream."""
        stream = self.placement.stream
        if stream is None or stream.hello is None:
            raise Broken("the executor is not connected")
        return stream.hello

    async def report(self, key: Key, *states: int) -> agent_pb2.AttemptReport:
        """Return the report of an attempt in one of some states, when it comes."""

        def there() -> bool:
            report = self.placement.reports.get(key)
            return report is not None and report.state in states

        await self.expect(there, f"a report of {key[0]}/{key[1]} as {' or '.join(map(state_name, states))}")
        return self.placement.reports[key]

    async def expect(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that must come."""
        if not await self.placement.until(condition, self.seconds_max):
            raise Broken(f"expected {what} within {self.seconds_max:g} s, and it did not come")

    async def new_stream(self, after: int) -> Stream:
        """Return the next stream with a hello, after this number of streams."""

        def there() -> bool:
            stream = self.placement.stream
            return stream is not None and stream.number > after

        await self.expect(there, "a new stream that begins with a hello")
        stream = self.placement.stream
        assert stream
        return stream

    async def cut(self) -> Stream:
        """Cut the stream, and return the next one."""
        before = self.placement.stream
        if before is None:
            raise Broken("the executor is not connected")
        before.close()
        return await self.new_stream(before.number)

    async def settled(self) -> None:
        """Wait until the executor has carried out everything that was sent before: it runs one more job."""
        key = self.assign(self.assignment(f"check-barrier-{self.next_epoch()}", "exit 0"))
        await self.report(key, SUCCEEDED)
        self.acknowledge(key)

    # What the jobs noted -----------------------------------------------------------------------------------------

    def notes(self, job_id: str) -> Path:
        """Return the file in which a job notes its process ids, one per start."""
        return self.folder / job_id

    def starts(self, job_id: str) -> list[int]:
        """Return the process ids of all starts of a job."""
        path = self.notes(job_id)
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def started_once(self, job_id: str) -> int:
        """Check that a job was started once; return its process id."""
        starts = self.starts(job_id)
        if len(starts) != 1:
            raise Broken(f"the command of {job_id} was started {len(starts)} times, not once")
        return starts[0]

    async def gone(self, pid: int, seconds: float, what: str) -> None:
        """Wait until a process is gone."""
        until = asyncio.get_running_loop().time() + seconds
        while alive(pid):
            if asyncio.get_running_loop().time() > until:
                raise Broken(f"{what}: process {pid} still runs after {seconds:g} s")
            await self.placement.until(lambda: False, 0.05)


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def forever(trap: str = "") -> str:
    """Return a script that runs until it is stopped."""
    return f"{trap}while :; do sleep 0.05; done" if trap else "exec sleep 600"


# The laws, in order ------------------------------------------------------------------------------------------------


async def registers(script: Script) -> None:
    """The first message of a stream is a hello with the node's id, its inventory and an incarnation."""
    hello = (await script.new_stream(0)).hello
    assert hello
    if not hello.node_id:
        raise Broken("the hello has no node_id")
    if len(hello.inventory.cores) < CORES_MIN:
        raise Broken(f"the inventory has {len(hello.inventory.cores)} cores; two attempts are to run there at a time")
    if not hello.incarnation:
        raise Broken("the hello has no incarnation, by which a second executor with the same node id is noticed")
    ids = [core.id for core in hello.inventory.cores]
    if len(set(ids)) != len(ids):
        raise Broken("the inventory lists a core twice")
    able = hello.capabilities
    if node_capabilities_pb2.CAPABILITY_PROFILES in able.able and (
        able.cores != node_capabilities_pb2.CORE_CONTROL_RESIZE
    ):
        raise Broken("the hello declares CAPABILITY_PROFILES without CORE_CONTROL_RESIZE")


async def keeps_contact(script: Script) -> None:
    """An idle executor sends a message at least every two heartbeat intervals."""
    stream = script.placement.stream
    assert stream
    for _ in range(3):
        if not await script.placement.until(_more_than(stream, stream.messages), 2 * BEAT_SECONDS + 1.0):
            raise Broken(f"the interval is {BEAT_SECONDS:g} s, and no message came for {2 * BEAT_SECONDS + 1.0:g} s")


async def runs_an_assignment(script: Script) -> None:
    """An assignment starts its command once, and is reported as RUNNING with its epoch and the time of its start."""
    order = script.assignment(LASTING, forever())
    report = await script.report(script.assign(order), RUNNING)
    if report.epoch != order.epoch:
        raise Broken(f"the assignment has epoch {order.epoch}, its report {report.epoch}")
    if not report.HasField("start_time"):
        raise Broken("the report of RUNNING has no start_time")
    await script.expect(lambda: bool(script.starts(LASTING)), "the command of check-run to start")
    script.started_once(LASTING)


async def ignores_a_repeated_assignment(script: Script) -> None:
    """An assignment that is repeated starts nothing twice."""
    epoch = script.placement.reports[LASTING, 1].epoch
    for _ in range(3):
        script.assign(script.assignment(LASTING, forever(), epoch=epoch))
    await script.settled()
    script.started_once(LASTING)


async def reports_exit_codes(script: Script) -> None:
    """A command that exits with 0 is reported as SUCCEEDED, any other as FAILED with its code."""
    for code, state in ((0, SUCCEEDED), (3, FAILED)):
        key = script.assign(script.assignment(f"check-exit-{code}", f"exit {code}"))
        report = await script.report(key, SUCCEEDED, FAILED)
        if report.state != state or report.exit.code != code:
            told = f"{state_name(report.state)} with code {report.exit.code}"
            raise Broken(f"a command that exits with {code} was reported as {told}")
        script.acknowledge(key)


async def keeps_ends_until_acknowledged(script: Script) -> None:
    """The end of an attempt is in every hello until it is acknowledged, and in none after that."""
    key = script.assign(script.assignment("check-kept", "exit 5"))
    await script.report(key, FAILED)
    hello = (await script.cut()).hello
    assert hello
    ends = [(one.state, one.exit.code) for one in hello.attempts if (one.job_id, one.number) == key]
    if ends != [(FAILED, 5)]:
        raise Broken(f"the end of {key[0]} was not acknowledged, and the next hello has {ends or 'nothing'} of it")
    script.acknowledge(key)
    await script.settled()
    hello = (await script.cut()).hello
    assert hello
    if any((one.job_id, one.number) == key for one in hello.attempts):
        raise Broken(f"the end of {key[0]} was acknowledged, and the hello after that still has it")


async def runs_on_between_streams(script: Script) -> None:
    """When a stream is cut, attempts run on; the next hello has them, and nothing is started twice."""
    pid = script.started_once(LASTING)
    hello = (await script.cut()).hello
    assert hello
    states = [one.state for one in hello.attempts if (one.job_id, one.number) == (LASTING, 1)]
    if states != [RUNNING]:
        raise Broken(f"check-run runs, and the next hello has it as {[state_name(state) for state in states]}")
    await script.settled()
    if script.started_once(LASTING) != pid or not alive(pid):
        raise Broken(f"process {pid} of check-run did not survive the cut of the stream")


async def stops_with_grace(script: Script) -> None:
    """A stop warns the processes, if SIGNALS is declared, and kills them after the grace; STOPPED has the reason."""
    warned = script.folder / "check-warned-note"
    order = script.assignment("check-stop", forever(f"trap 'echo > {warned}; exit 0' TERM; "))
    key = script.assign(order)
    await script.report(key, RUNNING)
    await script.expect(lambda: bool(script.starts("check-stop")), "the command of check-stop to start")
    script.stop(key, script.next_epoch(), 20.0)
    report = await script.report(key, STOPPED, SUCCEEDED, FAILED)
    if report.state != STOPPED or report.stop_reason != job_pb2.STOP_REASON_CANCELLED:
        told = f"{state_name(report.state)} for {job_pb2.StopReason.Name(report.stop_reason)}"
        raise Broken(f"an attempt that was stopped for STOP_REASON_CANCELLED was reported as {told}")
    if _can(script, node_capabilities_pb2.CAPABILITY_SIGNALS) and not warned.exists():
        raise Broken("the processes were not sent SIGTERM before they were killed")
    script.acknowledge(key)


async def kills_after_grace(script: Script) -> None:
    """Processes that ignore the warning are killed after the grace."""
    key = script.assign(script.assignment("check-stubborn", forever("trap '' TERM; ")))
    await script.report(key, RUNNING)
    await script.expect(lambda: bool(script.starts("check-stubborn")), "the command of check-stubborn to start")
    pid = script.started_once("check-stubborn")
    script.stop(key, script.next_epoch())
    await script.report(key, STOPPED)
    await script.gone(pid, script.seconds_max, "an attempt was reported as STOPPED")
    script.acknowledge(key)


async def answers_a_stop_of_what_it_lacks(script: Script) -> None:
    """A stop of an attempt that the executor does not have is answered with STOPPED."""
    key = ("check-unknown", 1)
    script.stop(key, script.next_epoch())
    await script.report(key, STOPPED)
    script.acknowledge(key)


async def ignores_older_epochs(script: Script) -> None:
    """An order with an epoch older than the newest seen for the job is not obeyed."""
    pid, report = script.started_once(LASTING), script.placement.reports[LASTING, 1]
    script.stop((LASTING, 1), report.epoch - 1, 0.0)
    script.assign(script.assignment(LASTING, forever(), number=2, epoch=report.epoch - 1))
    await script.settled()
    if script.started_once(LASTING) != pid:
        raise Broken("an assignment with an older epoch was started")
    if not alive(pid) or script.placement.reports[LASTING, 1].state != RUNNING:
        raise Broken(f"a stop with epoch {report.epoch - 1} stopped an attempt with epoch {report.epoch}")


async def ignores_a_deposed_leader(script: Script) -> None:
    """A welcome with a smaller term than one seen before is not obeyed: the executor leaves the stream."""
    script.placement.term -= 1
    before = script.placement.stream
    assert before
    before.close()
    deposed = await script.new_stream(before.number)
    script.assign(script.assignment("check-deposed", forever()))
    left = await script.placement.until(lambda: deposed.closed, script.seconds_max)
    script.placement.term += 1
    if script.starts("check-deposed"):
        raise Broken("an assignment of a leader with a smaller term was started")
    if not left:
        deposed.close()
        raise Broken(f"term {script.placement.term} was followed by a smaller one, and the executor stayed connected")
    await script.new_stream(deposed.number)


async def ignores_unknown_fields(script: Script) -> None:
    """Fields that the executor does not know are ignored."""
    order = script.assignment("check-fields", "exit 0")
    order.MergeFromString(UNKNOWN_FIELD)
    order.spec.MergeFromString(UNKNOWN_FIELD)
    message = agent_pb2.ConnectResponse(assignments=[order])
    message.MergeFromString(UNKNOWN_FIELD)
    script.placement.send(message)
    key = "check-fields", 1
    await script.report(key, SUCCEEDED)
    script.acknowledge(key)


async def survives_a_kill(script: Script) -> None:
    """After a kill and a new start of the executor, an attempt is adopted, or its processes are gone and it is lost.

    Epochs are remembered: an older order is still not obeyed.
    """
    pid, report = script.started_once(LASTING), script.placement.reports[LASTING, 1]
    before = script.placement.stream
    assert before
    await script.process.kill()
    await script.process.start()
    hello = (await script.new_stream(before.number)).hello
    assert hello
    states = [one.state for one in hello.attempts if (one.job_id, one.number) == (LASTING, 1)]
    script.assign(script.assignment(LASTING, forever(), number=3, epoch=report.epoch - 1))
    await script.settled()
    if len(script.starts(LASTING)) > 1:
        raise Broken("an order older than one seen before the kill was obeyed after it")
    if states == [RUNNING]:
        if not alive(pid):
            raise Broken(f"the hello after the kill reports check-run as RUNNING, but its process {pid} is gone")
        script.stop((LASTING, 1), script.next_epoch(), 0.0)
        await script.report((LASTING, 1), STOPPED)
    await script.gone(pid, script.seconds_max, "the hello after the kill does not have check-run, which is lost")


LAWS: tuple[Callable[[Script], Awaitable[None]], ...] = (
    registers,
    keeps_contact,
    runs_an_assignment,
    ignores_a_repeated_assignment,
    reports_exit_codes,
    keeps_ends_until_acknowledged,
    runs_on_between_streams,
    stops_with_grace,
    kills_after_grace,
    answers_a_stop_of_what_it_lacks,
    ignores_older_epochs,
    ignores_a_deposed_leader,
    ignores_unknown_fields,
    survives_a_kill,
)


def law_in_words(law: Callable[[Script], Awaitable[None]]) -> str:
    """Return a law in one sentence."""
    return (law.__doc__ or law.__name__).partition("\n")[0]


def _more_than(stream: Stream, count: int) -> Callable[[], bool]:
    return lambda: stream.messages > count


def _can(script: Script, capability: node_capabilities_pb2.Capability.ValueType) -> bool:
    hello = script.hello
    return not hello.HasField("capabilities") or capability in hello.capabilities.able


def leftovers(folder: Path) -> list[int]:
    """Return the processes of jobs that still run."""
    noted = [int(line) for path in folder.glob("check-*") for line in path.read_text().split() if line.isdigit()]
    return [pid for pid in noted if alive(pid) and pid != os.getpid()]
