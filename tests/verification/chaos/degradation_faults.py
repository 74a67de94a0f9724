"""Faults other than crashes and partitions: slow, silent or starved parts, and nodes that refuse launches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.end_to_end.commands import Serving
from tests.verification.chaos import black_hole, greedy_client
from tests.verification.chaos.launch_refusals import refuse
from tests.verification.chaos.limits import Limit
from tests.verification.chaos.link import Impairment
from tests.verification.chaos.mesh import Mesh
from tests.verification.chaos.plan import GUEST, MEMBERS, NODES, PYTHON, RUNNING_SECONDS, Fault, Hook, Mode, Step
from tests.verification.chaos.store_faults import StoreFaults

End = Callable[[], bool]  # ends a fault, and returns whether it had an effect
PERIOD_SECONDS = 0.1  # of a CPU quota
JUMP_SECONDS = 0.5  # between jumps of a jumping clock
MIN_DELAY_SHARE = 0.8  # of the maximum delay of a slow store: every packet is slow
STREAMS, CONNECTIONS = 150, 400
EXPIRES_AFTER_SECONDS = 2
RENEWED_EVENT = "tls_files_reloaded"


@dataclass
class DegradationFaults:
    """Begins such faults; call `tick` repeatedly while they last."""

    mesh: Mesh
    store: StoreFaults
    not_launched: Mapping[str, int]  # by node: number of attempts it could not launch
    _refusing: set[str] = field(default_factory=set)  # nodes
    _ticking: dict[int, Callable[[float], None]] = field(default_factory=dict)  # by step

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for each in list(self._ticking.values()):
            each(now)

    def begin(self, step: Step) -> End | bool:
        """Begin a fault; return how to end it, or False if it is impossible now."""
        match step.fault:
            case Fault.REFUSE_LAUNCH:
                return self._refuse(step)
            case Fault.STUTTER:
                return self._stutter(step)
            case Fault.STARVE:
                return self._starve(step)
            case Fault.BLACK_HOLE:
                return self._black_hole(step)
            case Fault.SLOW_STORE:
                return self._slow_store(step)
            case Fault.DRIFT:
                return self._drift(step)
            case Fault.NAME_ERROR:
                return self._name_error(step)
            case Fault.EXPIRE:
                return self._expire(step)
            case Fault.GREEDY_CLIENT:
                return self._greedy(step)
        return self.store.begin(step)

    def _refuse(self, step: Step) -> End | bool:
        if step.part in self._refusing:  # stacked mounts would have to be removed in order
            return False
        node_id = self.mesh.node_ids[step.part]
        before = self.not_launched.get(node_id, 0)
        undo = refuse(self.mesh, step.part, Hook(step.point))
        if undo is None:
            return False
        self._refusing.add(step.part)

        def end() -> bool:
            self._refusing.remove(step.part)
            undo()
            return self.not_launched.get(node_id, 0) > before

        return end

    def _stutter(self, step: Step) -> End | bool:
        """Stop and resume a part repeatedly. Effective if it was running at the start."""
        mesh, part, due, stopped = self.mesh, step.part, [0.0], [False]
        ran = mesh.is_running(part)

        def tick(now: float) -> None:
            if now < due[0]:
                return
            (mesh.resume if stopped[0] else mesh.pause)(part)
            stopped[0] = not stopped[0]
            due[0] = now + (step.amount if stopped[0] else RUNNING_SECONDS)

        def end() -> bool:
            del self._ticking[step.number]
            if stopped[0]:
                mesh.resume(part)
            return ran

        self._ticking[step.number] = tick
        return end

    def _starve(self, step: Step) -> End | bool:
        """Limit a part to a share of one CPU. Effective if it was throttled."""
        pid = self.mesh.pid(step.part)
        limit = Limit.make("cpu", f"{self.mesh.directory.name}-{step.number}-{step.part}") if pid else None
        if pid is None or limit is None:
            return False
        period = round(PERIOD_SECONDS * 1e6)
        limit.write("cpu.cfs_period_us", str(period))
        limit.write("cpu.cfs_quota_us", str(round(period * step.amount)))
        limit.take(pid)

        def end() -> bool:
            stat = dict(line.split() for line in limit.read("cpu.stat").splitlines())
            limit.remove()
            return int(stat.get("nr_throttled", 0)) > 0

        return end

    def _black_hole(self, step: Step) -> End | bool:
        """Replace a running part with a listener that never answers."""
        if not self.mesh.is_there(step.part):
            return False
        mode = black_hole.SILENT if step.point == Mode.SILENT else black_hole.MUTE
        hole = self.mesh.stand_in(step.part, "tests.verification.chaos.black_hole", mode)

        def end() -> bool:
            hole.kill()
            self.mesh.bring_back(step.part)
            return black_hole.MET in hole.said

        return end

    def _slow_store(self, step: Step) -> End:
        machines = self.mesh.machines
        pairs = [(part, member) for part in PYTHON if part not in NODES for member in MEMBERS]
        pairs += [(member, part) for part, member in pairs]
        impairment = Impairment(delay_seconds_max=step.amount, delay_seconds_min=MIN_DELAY_SHARE * step.amount)
        before = machines.affected_packets(pairs)
        machines.impair(pairs, impairment)

        def end() -> bool:
            affected_packets = machines.affected_packets(pairs) > before
            machines.stop_impairing(pairs, impairment)
            return affected_packets

        return end

    def _drift(self, step: Step) -> End | bool:
        """Make a clock drift, or jump forward and back; its final offset remains."""
        if not self.mesh.clock:
            return False
        last, sign = [time.monotonic()], [1]

        def tick(now: float) -> None:
            passed = now - last[0]
            if step.point == Mode.RATE:
                self.mesh.set_clock(step.part, step.amount * passed)
            elif passed >= JUMP_SECONDS:
                self.mesh.set_clock(step.part, sign[0] * 2 * step.amount)
                sign[0] = -sign[0]
            else:
                return
            last[0] = now

        def end() -> bool:
            del self._ticking[step.number]
            return True

        self._ticking[step.number] = tick
        return end

    def _name_error(self, step: Step) -> End | bool:
        names = self.mesh.names
        if names is None or step.part in names.modes:
            return False
        before = names.asked[step.part]
        names.modes[step.part] = Mode(step.point)

        def end() -> bool:
            del names.modes[step.part]
            return names.asked[step.part] > before

        return end

    def _expire(self, step: Step) -> End | bool:
        """Give a part a certificate that expires within seconds. Effective if the part loaded it."""
        mesh, certificates, clock = self.mesh, self.mesh.certificates, self.mesh.clock
        if certificates is None or clock is None:
            return False
        begin = mesh.log_size(step.part)
        certificates.reissue(step.part, mesh.addresses, clock, expires_after_seconds=EXPIRES_AFTER_SECONDS)

        def end() -> bool:
            taken = RENEWED_EVENT in mesh.log_since(step.part, begin)
            certificates.reissue(step.part, mesh.addresses, clock)
            return taken

        return end

    def _greedy(self, step: Step) -> End:
        kind, count = greedy_client.STREAMS, STREAMS
        if step.point == Mode.CONNECTIONS:
            kind, count = greedy_client.CONNECTIONS, CONNECTIONS
        client = self.mesh.run_on(
            GUEST, "tests.verification.chaos.greedy_client", kind, self.mesh.address(step.part), str(count)
        )

        def end() -> bool:
            client.kill()
            return held_count(client) > 0

        return end


def held_count(client: Serving) -> int:
    """Return how many streams or connections a greedy client reports as open."""
    words = [line.split() for line in client.said.splitlines() if line.startswith(greedy_client.HELD)]
    with contextlib.suppress(IndexError, ValueError):
        return int(words[-1][1])
    return 0
