"""What goes wrong when: drawn from a seed before anything runs, and nothing else decides it.

The same seed and the same numbers give the same plan; how it meets the processes is up to the kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice
from random import Random

from cotenant.fail_points import POINTS

LEASE_SECONDS = 2.0  # of whoever leads a service
LONG_SECONDS = (LEASE_SECONDS + 0.5, 10.0)
SHORT_SECONDS = (0.1, LEASE_SECONDS)
LONG_SHARE = 0.35
LONELY_SECONDS, LONELY_SHARE, LONELY_LONG_SHARE = (10.0, 18.0), 0.4, 0.5  # nodes alone: jobs of some stop by themselves
PAUSE_SECONDS = (0.2, 1.0)  # between two steps
ETCD, SERVICES, AGENTS, CLIENT = "etcd", ("placement", "queue", "predictor", "contention"), 5, "client"
CLOCK_SECONDS = (0.5, 2.0, 30.0, 3_600.0, 86_400.0)
DELAY_SECONDS, LOSS = (0.02, 0.4), (0.02, 0.4)


class Fault(StrEnum):
    """What can be done to a mesh."""

    KILL = "kill"  # with SIGKILL, and started again after a while
    RESTART = "restart"  # as an operator does
    KILL_JOB = "kill job"  # a process of a job
    KILL_SUPERVISOR = "kill supervisor"  # of an attempt
    PAUSE = "pause"  # SIGSTOP, then SIGCONT
    CUT = "cut"  # nothing passes between two parts, in neither direction
    CUT_ONE_WAY = "cut one way"  # nothing passes from a part to its peer
    ISOLATE = "isolate"  # nothing passes between a part and all others
    DELAY = "delay"  # packets between two parts take longer, each its own time
    LOSE = "lose"  # packets between two parts are dropped now and then
    GARBLE = "garble"  # frames that a part sends to its peer arrive with another head
    FILL = "fill"  # the disk of a part that writes has no room left
    CLOCK = "clock"  # the wall clock of a part jumps, for good
    NO_MAJORITY = "no majority"  # two members of etcd are killed
    OLD_LEADER = "old leader"  # in the place of a placement is one that does not know that its term is over
    FAIL_POINT = "fail point"  # whoever first comes to a named place is killed or halted there


@dataclass(frozen=True, slots=True)
class Step:
    """One fault: when it begins after the one before, which part it is done to, for how long, and how much of it.

    `amount` is the jump of a clock, or the longest delay, in seconds, or the share of packets that is lost; `point` is
    the name of a fail point and what happens there. Its part is a service, or agents as a whole: whoever comes there.
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
WRITERS = (*NODES, *NODES, "queue-1", "queue-2")  # who writes on a disk of its own: attempts, and the archive
WEIGHTS = {part: 5 if part.startswith(("placement", "queue")) else 1 for part in PARTS}  # what decides is hit the most
PAIRS = (  # who speaks with whom, and how often that is disturbed
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
    Fault.FAIL_POINT: 13,
}
HALTED_SECONDS = (LEASE_SECONDS + 0.5, 6.0)  # at a fail point: for so long that another leads meanwhile
ELECTED = ("placement", "queue", "predictor")  # services whose leaders write
UNDRAWN = ("restore.filling", "restore.filled")  # nobody comes there in a mesh
DRAWN = tuple(point for point in POINTS if point not in UNDRAWN)
OFTEN = ("queue", "placement", "predictor", "agent")  # kinds of fail points that are passed all the time
SELDOM = ("placement.loading", "agent.resized")  # but for these
TIMES_MAX = 4  # those are passed so often, less one, before anything happens


def plan(
    seed: int, steps: int, faults: Container[Fault] = frozenset(Fault), points: Collection[str] = DRAWN
) -> list[Step]:
    """Draw so many steps, of some faults and some fail points.

    >>> plan(7, 3) == plan(7, 4)[:3]
    True
    """
    return list(islice(drawn(seed, faults, points), steps))


def drawn(seed: int, faults: Container[Fault] = frozenset(Fault), points: Collection[str] = DRAWN) -> Iterator[Step]:
    """Draw steps without end; no fail point comes again before each other one has come."""
    rng = Random(f"chaos {seed}")
    shares = {fault: share if fault in faults else 0 for fault, share in SHARES.items()}
    deck: list[str] = []
    for number in count(1):
        deck = deck or rng.sample(sorted(points), len(points))
        yield _step(rng, number, rng.choices(list(shares), list(shares.values()))[0], deck)


def cut_off(step: Step) -> frozenset[str]:
    """Agents that placement may hear nothing from, by that fault; by a fail point, once somebody is there."""
    if step.fault in (Fault.KILL_JOB, Fault.KILL_SUPERVISOR, Fault.CLOCK, Fault.FAIL_POINT):
        return frozenset()
    return cut_off_without({step.part, step.peer} - {""})


def cut_off_without(touched: Set[str]) -> frozenset[str]:
    """Agents that placement may hear nothing from while something is wrong with some parts, or between them."""
    if any(_is_of(part, ("placement", ETCD)) for part in touched) and not touched & {*NODES, CLIENT}:
        return frozenset(NODES)
    return frozenset(touched & {*NODES})


def _step(rng: Random, number: int, fault: Fault, deck: list[str]) -> Step:
    after = round(rng.uniform(*PAUSE_SECONDS), 2)
    part, peer = _drawn_for(fault, rng)
    seconds, amount, point = _seconds(rng), 0.0, ""
    match fault:
        case Fault.ISOLATE if part in NODES and rng.random() < LONELY_LONG_SHARE:
            seconds = round(rng.uniform(*LONELY_SECONDS), 2)
        case Fault.OLD_LEADER | Fault.FILL:
            seconds = round(rng.uniform(*LONG_SECONDS), 2)
        case Fault.FAIL_POINT:
            seconds = round(rng.uniform(*HALTED_SECONDS), 2)
            part, point = _point(rng, deck.pop())
        case Fault.KILL_JOB | Fault.KILL_SUPERVISOR | Fault.RESTART:
            seconds = 0.0
        case Fault.CLOCK:
            seconds, amount = 0.0, rng.choice(CLOCK_SECONDS) * rng.choice((1, -1))
        case Fault.DELAY:
            amount = round(rng.uniform(*DELAY_SECONDS), 3)
        case Fault.LOSE:
            amount = round(rng.uniform(*LOSS), 3)
    return Step(number, after, fault, part, peer, seconds, amount, point)


def _point(rng: Random, point: str) -> tuple[str, str]:
    """Draw who is to come to a fail point, and what happens there."""
    kind = point.partition(".")[0]
    times = rng.randint(1, TIMES_MAX) if kind in OFTEN and point not in SELDOM else 1
    part = {"election": rng.choice(ELECTED), "array": "queue", "tenant": "queue", "upkeep": "queue"}.get(kind, kind)
    return part, f"{point}={rng.choice(('kill', 'stop'))}@{times}"


def _drawn_for(fault: Fault, rng: Random) -> tuple[str, str]:
    """The part, and its peer where there has to be one."""
    match fault:
        case Fault.KILL_JOB | Fault.KILL_SUPERVISOR:
            return rng.choice(NODES), ""
        case Fault.CLOCK:
            return _weighted(rng, PYTHON), ""
        case Fault.FILL:
            return rng.choice(WRITERS), ""
        case Fault.ISOLATE if rng.random() < LONELY_SHARE:
            return rng.choice(NODES), ""
        case Fault.OLD_LEADER:
            return rng.choice([part for part in REPLICAS if _is_of(part, ("placement",))]), ""
        case Fault.NO_MAJORITY:
            one, other = rng.sample(MEMBERS, 2)
            return one, other
        case Fault.CUT | Fault.CUT_ONE_WAY | Fault.DELAY | Fault.LOSE | Fault.GARBLE:
            return _pair(rng)
    return _weighted(rng, PARTS), ""


def _pair(rng: Random) -> tuple[str, str]:
    ours, theirs, _ = rng.choices(PAIRS, [weight for *_, weight in PAIRS])[0]
    part = rng.choice([part for part in (*PARTS, CLIENT) if _is_of(part, ours)])
    peer = rng.choice([peer for peer in PARTS if _is_of(peer, theirs) and peer != part])
    return (part, peer) if rng.random() < 0.5 else (peer, part)


def _is_of(part: str, kinds: Sequence[str]) -> bool:
    return part.partition("-")[0] in kinds


def _weighted(rng: Random, parts: Sequence[str]) -> str:
    return rng.choices(parts, [WEIGHTS[part] for part in parts])[0]


def _seconds(rng: Random) -> float:
    return round(rng.uniform(*(LONG_SECONDS if rng.random() < LONG_SHARE else SHORT_SECONDS)), 2)
