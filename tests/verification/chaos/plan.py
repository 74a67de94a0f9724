"""The plan of faults: drawn from a seed before anything runs.

The same seed and figures give the same plan; how it hits the processes is up to the kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice
from random import Random

from cotenant.fail_points import POINTS

LEASE_SECONDS = 2.0  # of a service's leader
LONG_SECONDS = (LEASE_SECONDS + 0.5, 10.0)
SHORT_SECONDS = (0.1, LEASE_SECONDS)
LONG_SHARE = 0.35
ISOLATED_SECONDS, ISOLATED_SHARE, ISOLATED_LONG_SHARE = (
    (10.0, 18.0),
    0.4,
    0.5,
)  # isolated nodes: some jobs then stop by themselves
PAUSE_SECONDS = (0.2, 1.0)  # between two steps
ETCD, SERVICES, AGENTS, CLIENT = "etcd", ("placement", "queue", "predictor", "contention"), 5, "client"
GUEST, OPERATOR = "guest", "operator"  # machines of a greedy client, and of the operator who runs `status`
CLOCK_SECONDS = (0.5, 2.0, 30.0, 3_600.0, 86_400.0)
DELAY_SECONDS, LOSS_SHARE = (0.02, 0.4), (0.02, 0.4)
LASTING_SECONDS = (36.0, 42.0)  # long enough that `status` must name the fault
STOPPED_SECONDS, RUNNING_SECONDS = (0.05, 3.0), 0.2  # in each cycle of a stuttering part
CPU_SHARE, DRIFT_RATE, STORE_SECONDS = (0.03, 0.2), (0.01, 3.0), (0.05, 0.5)


class Fault(StrEnum):
    """Faults that can be injected."""

    KILL = "kill"  # SIGKILL, and a start after a while
    RESTART = "restart"  # as an operator does
    KILL_JOB = "kill job"  # SIGKILL to a process of a job
    KILL_SUPERVISOR = "kill supervisor"  # SIGKILL to an attempt's supervisor
    PAUSE = "pause"  # SIGSTOP, then SIGCONT
    CUT = "cut"  # drops all packets between two parts, in both directions
    CUT_ONE_WAY = "cut one way"  # drops all packets from a part to its peer
    ISOLATE = "isolate"  # drops all packets between a part and all others
    DELAY = "delay"  # delays packets between two parts, each by its own time
    LOSE = "lose"  # drops some packets between two parts
    GARBLE = "garble"  # damages the heads of frames from a part to its peer
    FILL = "fill"  # fills the disk of a part that writes
    CLOCK = "clock"  # the wall clock of a part jumps, permanently
    NO_MAJORITY = "no majority"  # two members of etcd are killed
    OLD_LEADER = "old leader"  # a placement is replaced by one that does not know that its term is over
    FAIL_POINT = "fail point"  # the first process that reaches a named place is killed or stopped there
    REFUSE_LAUNCH = "refuse launch"  # a node refuses what a launch needs, see `Hook`
    STUTTER = "stutter"  # SIGSTOP and SIGCONT in turn, for shorter and longer than a lease each time
    STARVE = "starve"  # a part gets a few percent of a CPU
    BLACK_HOLE = "black hole"  # a listener in a part's place accepts connections and never answers
    SLOW_STORE = "slow store"  # each packet between services and etcd is delayed
    FULL_STORE = "full store"  # etcd reaches its quota: it answers reads and refuses writes
    DRIFT = "drift"  # a part's wall clock runs too fast or too slow, or jumps back and forth
    NAME_ERROR = "name error"  # a machine's name server fails, is silent, or slow
    EXPIRE = "expire"  # a part's certificate expires during its streams, and is rotated later
    GREEDY_CLIENT = "greedy client"  # one client holds streams that it never reads, or idle connections
    OLD_STORE = "old store"  # etcd is restored from an earlier snapshot
    OTHER_STORE = "other store"  # etcd starts empty, as another cluster


class Hook(StrEnum):
    """What a launch needs and a node can refuse."""

    GROUP = "control group"  # the node's memory hierarchy is read-only
    DIRECTORY = "directory"  # the directory of attempts is read-only
    DEVICE = "device"  # /dev/null cannot be opened
    FORK = "fork"  # the agent is at its process limit
    USER = "user"  # user names cannot be looked up; affects only users' jobs, with TLS
    DISK = "disk"  # the agent's disk is read-only
    DESCRIPTORS = "descriptors"  # the agent is at its descriptor limit


class Mode(StrEnum):
    """The ways in which a fault can be injected."""

    SILENT = "accepts and never speaks"
    MUTE = "speaks HTTP/2 and never answers a call"
    RATE = "drifts"
    JUMPS = "jumps back and forth"
    REFUSED = "every name is refused"
    SILENCED = "queries are never answered"
    LATE = "every answer is late"
    STREAMS = "watches are never read"
    CONNECTIONS = "connections are idle"


@dataclass(frozen=True, slots=True)
class Step:
    """One fault: its delay after the previous one, the affected part, its duration and amount.

    `amount` is the jump of a clock, the maximum delay or the time stopped in each cycle, in seconds, the rate of a
    drift, or the share of lost packets or of CPU. `point` is a fail point and its action, or the `Hook` or `Mode` of
    some other faults. The part of a fail point is a service, or agents as a whole: any process that reaches it. The
    part of faults of the whole store is `ETCD`.
    """

    number: int
    after_seconds: float
    fault: Fault
    part: str = ""
    peer: str = ""
    seconds: float = 0.0
    amount: float = 0.0
    point: str = ""

    def __str__(self) -> str:
        pair = f"{self.part} → {self.peer}" if self.peer else self.part
        words = [f"{self.number:4d}", str(self.fault), pair, *([self.point] if self.point else [])]
        words += [f"{self.amount:+.2f}"] if self.amount else []
        return " ".join([*words, f"for {self.seconds:.1f} s" if self.seconds else ""]).rstrip()


MEMBERS = tuple(f"{ETCD}-{number}" for number in (1, 2, 3))
REPLICAS = tuple(f"{service}-{number}" for service in SERVICES for number in (1, 2))
NODES = tuple(f"agent-{number}" for number in range(1, AGENTS + 1))
PYTHON = (*REPLICAS, *NODES)
PARTS = (*MEMBERS, *PYTHON)
DISK_WRITERS = (*NODES, *NODES, "queue-1", "queue-2")  # parts that write to their own disk: attempts, and the archive
WEIGHTS = {part: 5 if part.startswith(("placement", "queue")) else 1 for part in PARTS}  # schedulers are hit most
PAIRS = (  # links between parts, and how often they are impaired
    (SERVICES[:2], (ETCD,), 4),
    (("placement",), ("queue",), 2),
    (("agent",), ("placement",), 4),
    (("agent",), ("contention",), 1),
    (("queue",), ("predictor",), 1),
    (("predictor",), (ETCD,), 1),
    (("contention",), ("placement",), 1),
    (("contention",), ("queue",), 1),
    (("queue",), ("queue",), 1),
    (("placement",), ("placement",), 1),
    (("predictor",), ("predictor",), 1),
    ((ETCD,), (ETCD,), 3),
    ((CLIENT,), ("queue",), 2),
    ((CLIENT,), ("placement",), 1),
)
SHARES = {
    Fault.KILL: 20,
    Fault.RESTART: 4,
    Fault.KILL_JOB: 7,
    Fault.KILL_SUPERVISOR: 7,
    Fault.PAUSE: 14,
    Fault.CUT: 9,
    Fault.CUT_ONE_WAY: 9,
    Fault.ISOLATE: 6,
    Fault.DELAY: 6,
    Fault.LOSE: 5,
    Fault.GARBLE: 5,
    Fault.FILL: 4,
    Fault.CLOCK: 5,
    Fault.NO_MAJORITY: 2,
    Fault.OLD_LEADER: 3,
    Fault.FAIL_POINT: 18,
    Fault.REFUSE_LAUNCH: 12,
    Fault.STUTTER: 6,
    Fault.STARVE: 5,
    Fault.BLACK_HOLE: 4,
    Fault.SLOW_STORE: 4,
    Fault.FULL_STORE: 2,
    Fault.DRIFT: 4,
    Fault.NAME_ERROR: 3,
    Fault.EXPIRE: 3,
    Fault.GREEDY_CLIENT: 4,
    Fault.OLD_STORE: 1,
    Fault.OTHER_STORE: 1,
}
REGRESSIONS = frozenset({Fault.OLD_STORE, Fault.OTHER_STORE})  # drawn only on request
DEFAULT = frozenset(Fault) - REGRESSIONS
LASTING_SHARES = {  # share of faults that last long enough to be named
    Fault.KILL: 0.02,
    Fault.PAUSE: 0.02,
    Fault.ISOLATE: 0.02,
    Fault.FILL: 0.1,
    Fault.REFUSE_LAUNCH: 0.12,
    Fault.STUTTER: 0.05,
    Fault.STARVE: 0.05,
    Fault.BLACK_HOLE: 0.1,
    Fault.SLOW_STORE: 0.1,
    Fault.FULL_STORE: 0.2,
    Fault.NAME_ERROR: 0.2,
    Fault.EXPIRE: 0.2,
    Fault.OLD_STORE: 1.0,
    Fault.OTHER_STORE: 1.0,
}
MODES = {
    Fault.REFUSE_LAUNCH: tuple(Hook),
    Fault.BLACK_HOLE: (Mode.SILENT, Mode.MUTE),
    Fault.DRIFT: (Mode.RATE, Mode.JUMPS),
    Fault.NAME_ERROR: (Mode.REFUSED, Mode.SILENCED, Mode.LATE),
    Fault.GREEDY_CLIENT: (Mode.STREAMS, Mode.CONNECTIONS),
}
AMOUNTS = {
    Fault.DELAY: DELAY_SECONDS,
    Fault.LOSE: LOSS_SHARE,
    Fault.STUTTER: STOPPED_SECONDS,
    Fault.STARVE: CPU_SHARE,
    Fault.SLOW_STORE: STORE_SECONDS,
    Fault.DRIFT: DRIFT_RATE,
}
LONG = (  # faults without an effect, or unnoticed, if they are short
    Fault.OLD_LEADER,
    Fault.FILL,
    Fault.REFUSE_LAUNCH,
    Fault.STUTTER,
    Fault.STARVE,
    Fault.BLACK_HOLE,
    Fault.SLOW_STORE,
    Fault.FULL_STORE,
    Fault.DRIFT,
    Fault.NAME_ERROR,
    Fault.EXPIRE,
    Fault.GREEDY_CLIENT,
    *REGRESSIONS,
)
HALTED_SECONDS = (LEASE_SECONDS + 0.5, 6.0)  # at a fail point: long enough for another leader
HARMLESS = (  # faults that disconnect no agent
    Fault.KILL_JOB,
    Fault.KILL_SUPERVISOR,
    Fault.CLOCK,
    Fault.FAIL_POINT,
    Fault.DRIFT,
    Fault.GREEDY_CLIENT,
)
LEADER_POINTS = ("placement", "queue", "predictor")  # services whose leaders write
UNDRAWN_POINTS = ("restore.filling", "restore.filled")  # points that no process of a mesh reaches
DRAWN = tuple(point for point in POINTS if point not in UNDRAWN_POINTS)
FREQUENT_POINTS = ("queue", "placement", "predictor", "agent")  # services whose fail points are passed all the time
RARE_POINTS = ("placement.loading", "agent.resized")  # except for these
TIMES_MAX = 4  # such points take effect at a random pass up to this


def plan(seed: int, steps: int, faults: Container[Fault] = DEFAULT, points: Collection[str] = DRAWN) -> list[Step]:
    """Draw a number of steps, of some faults and some fail points.

    >>> plan(7, 3) == plan(7, 4)[:3]
    True
    """
    return list(islice(draw_steps(seed, faults, points), steps))


def draw_steps(
    seed: int,
    faults: Container[Fault] = DEFAULT,
    points: Collection[str] = DRAWN,
    lasting_share: float | None = None,
) -> Iterator[Step]:
    """Draw steps without end; a fail point is repeated only after all others were drawn.

    Of faults that `status` must name, a share of `lasting_share` last long enough; default: `LASTING_SHARES`.
    """
    lasting = LASTING_SHARES if lasting_share is None else dict.fromkeys(LASTING_SHARES, lasting_share)
    rng = Random(f"chaos {seed}")
    shares = {fault: share if fault in faults else 0 for fault, share in SHARES.items()}
    deck: list[str] = []
    for number in count(1):
        deck = deck or rng.sample(sorted(points), len(points))
        yield _step(rng, number, rng.choices(list(shares), list(shares.values()))[0], deck, lasting)


def cut_off(step: Step) -> frozenset[str]:
    """Return the agents that a fault may disconnect from placement; at a fail point, once it is reached."""
    if step.fault in HARMLESS:
        return frozenset()
    return cut_off_without({step.part, step.peer} - {""})


def cut_off_without(touched: Set[str]) -> frozenset[str]:
    """Return the agents that may be disconnected from placement while some parts, or links between them, fail."""
    if any(_is_of_kind(part, ("placement", ETCD)) for part in touched) and not touched & {*NODES, CLIENT}:
        return frozenset(NODES)
    return frozenset(touched & {*NODES})


def _step(rng: Random, number: int, fault: Fault, deck: list[str], lasting: Mapping[Fault, float]) -> Step:
    after = round(rng.uniform(*PAUSE_SECONDS), 2)
    part, peer = _amount_and_mode(fault, rng)
    seconds, amount, point = _seconds(rng), 0.0, ""
    if fault in LONG:
        seconds = round(rng.uniform(*LONG_SECONDS), 2)
    if fault in AMOUNTS:
        amount = round(rng.uniform(*AMOUNTS[fault]), 3)
    if fault in MODES:
        point = str(rng.choice([mode for mode in MODES[fault] if mode is not Mode.MUTE or part not in MEMBERS]))
    match fault:
        case Fault.ISOLATE if part in NODES and rng.random() < ISOLATED_LONG_SHARE:
            seconds = round(rng.uniform(*ISOLATED_SECONDS), 2)
        case Fault.FAIL_POINT:
            seconds = round(rng.uniform(*HALTED_SECONDS), 2)
            part, point = _point(rng, deck.pop())
        case Fault.KILL_JOB | Fault.KILL_SUPERVISOR | Fault.RESTART:
            seconds = 0.0
        case Fault.CLOCK:
            seconds, amount = 0.0, rng.choice(CLOCK_SECONDS) * rng.choice((1, -1))
        case Fault.DRIFT:
            amount *= rng.choice((1, -1))
    if rng.random() < lasting.get(fault, 0.0):
        seconds = round(rng.uniform(*LASTING_SECONDS), 2)
    return Step(number, after, fault, part, peer, seconds, amount, point)


def _point(rng: Random, point: str) -> tuple[str, str]:
    """Draw the service that is to reach a fail point, and the action there."""
    kind = point.partition(".")[0]
    times = rng.randint(1, TIMES_MAX) if kind in FREQUENT_POINTS and point not in RARE_POINTS else 1
    part = {"election": rng.choice(LEADER_POINTS), "array": "queue", "tenant": "queue", "upkeep": "queue"}.get(
        kind, kind
    )
    return part, f"{point}={rng.choice(('kill', 'stop'))}@{times}"


def _amount_and_mode(fault: Fault, rng: Random) -> tuple[str, str]:
    """Draw the part, and its peer if it needs one."""
    match fault:
        case Fault.KILL_JOB | Fault.KILL_SUPERVISOR | Fault.REFUSE_LAUNCH:
            return rng.choice(NODES), ""
        case Fault.CLOCK | Fault.DRIFT | Fault.NAME_ERROR | Fault.EXPIRE:
            return _weighted(rng, PYTHON), ""
        case Fault.BLACK_HOLE:
            return _weighted(rng, (*MEMBERS, *REPLICAS)), ""
        case Fault.GREEDY_CLIENT:
            return rng.choice([part for part in REPLICAS if _is_of_kind(part, SERVICES[:2])]), ""
        case Fault.SLOW_STORE | Fault.FULL_STORE | Fault.OLD_STORE | Fault.OTHER_STORE:
            return ETCD, ""
        case Fault.FILL:
            return rng.choice(DISK_WRITERS), ""
        case Fault.ISOLATE if rng.random() < ISOLATED_SHARE:
            return rng.choice(NODES), ""
        case Fault.OLD_LEADER:
            return rng.choice([part for part in REPLICAS if _is_of_kind(part, ("placement",))]), ""
        case Fault.NO_MAJORITY:
            one, other = rng.sample(MEMBERS, 2)
            return one, other
        case Fault.CUT | Fault.CUT_ONE_WAY | Fault.DELAY | Fault.LOSE | Fault.GARBLE:
            return _pair(rng)
    return _weighted(rng, PARTS), ""


def _pair(rng: Random) -> tuple[str, str]:
    ours, theirs, _ = rng.choices(PAIRS, [weight for *_, weight in PAIRS])[0]
    part = rng.choice([part for part in (*PARTS, CLIENT) if _is_of_kind(part, ours)])
    peer = rng.choice([peer for peer in PARTS if _is_of_kind(peer, theirs) and peer != part])
    return (part, peer) if rng.random() < 0.5 else (peer, part)


def _is_of_kind(part: str, kinds: Sequence[str]) -> bool:
    return part.partition("-")[0] in kinds


def _weighted(rng: Random, parts: Sequence[str]) -> str:
    return rng.choices(parts, [WEIGHTS[part] for part in parts])[0]


def _seconds(rng: Random) -> float:
    return round(rng.uniform(*(LONG_SECONDS if rng.random() < LONG_SHARE else SHORT_SECONDS)), 2)
