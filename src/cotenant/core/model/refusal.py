"""Refusals: why a job waits, as data: a code, the numbers, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType

from cotenant.core.model.dependencies import Condition
from cotenant.core.model.job import Locality
from cotenant.core.model.node import HeldNode
from cotenant.core.model.quantities import gib as gib
from cotenant.core.model.quantities import gpus as gpus
from cotenant.core.model.quantities import plural as plural
from cotenant.core.model.resources import KINDS, Resources, in_words


class Wait(StrEnum):
    """Kinds of waiting (Philly, section 3.1 [P]), by which simulations and metrics add them up."""

    FAIR_SHARE = "fair_share"
    FRAGMENTATION = "fragmentation"
    CAPACITY = "capacity"
    DEPENDENCY = "dependency"


class Code(StrEnum):
    """Stable reason codes."""

    CAPACITY = "CAPACITY"
    FRAGMENTED = "FRAGMENTED"
    NEVER_FITS = "NEVER_FITS"
    BEHIND = "BEHIND"
    OUTRANKED = "OUTRANKED"
    MAKING_ROOM = "MAKING_ROOM"
    QOS = "QOS"
    QUOTA = "QUOTA"
    NO_NODES = "NO_NODES"
    SUSPENDED = "SUSPENDED"
    BACK_OFF = "BACK_OFF"
    BEGIN_TIME = "BEGIN_TIME"
    SECRETS = "SECRETS"
    NOT_YET_CONSIDERED = "NOT_YET_CONSIDERED"
    GIVEN_UP = "GIVEN_UP"
    DEPENDENCY = "DEPENDENCY"
    ARRAY_LIMIT = "ARRAY_LIMIT"
    RESERVED = "RESERVED"
    POLICY_FAILED = "POLICY_FAILED"
    NODES_HELD = "NODES_HELD"


WAIT_OF: Mapping[Code, Wait] = MappingProxyType(
    {
        Code.CAPACITY: Wait.CAPACITY,
        Code.FRAGMENTED: Wait.FRAGMENTATION,
        Code.NEVER_FITS: Wait.CAPACITY,
        Code.BEHIND: Wait.CAPACITY,
        Code.OUTRANKED: Wait.CAPACITY,
        Code.MAKING_ROOM: Wait.CAPACITY,
        Code.QOS: Wait.FRAGMENTATION,  # enough is free, but not in the right place
        Code.QUOTA: Wait.FAIR_SHARE,
        Code.NO_NODES: Wait.CAPACITY,
        Code.SUSPENDED: Wait.DEPENDENCY,
        Code.BACK_OFF: Wait.DEPENDENCY,
        Code.BEGIN_TIME: Wait.DEPENDENCY,
        Code.SECRETS: Wait.DEPENDENCY,
        Code.NOT_YET_CONSIDERED: Wait.CAPACITY,
        Code.GIVEN_UP: Wait.CAPACITY,
        Code.DEPENDENCY: Wait.DEPENDENCY,
        Code.ARRAY_LIMIT: Wait.DEPENDENCY,
        Code.RESERVED: Wait.CAPACITY,
        Code.POLICY_FAILED: Wait.CAPACITY,
        Code.NODES_HELD: Wait.CAPACITY,
    }
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a job does not run now.

    `locality` is the topology level requested, if free resources are fragmented. `over_share` means that the job's
    tenant already holds its fair share. `holds_seconds`: after this time the policy would answer differently although
    nothing else happens, and if so relaxes the level to `relaxes_to`. `held_seconds`: the policy would have answered
    differently to a gang that had waited less, for fragmented resources, by more than this; so the reason is valid for
    all gangs with these requirements whose waits of this kind lie in between.
    """

    code: Code
    detail: str
    remedy: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    locality: Locality | None = None
    over_share: bool = False
    holds_seconds: float = math.inf
    held_seconds: float = math.inf
    relaxes_to: Locality | None = None

    @property
    def full_detail(self) -> str:
        """The detail, including what time alone will change.

        >>> Refusal(Code.FRAGMENTED, "best server has 6", holds_seconds=240, relaxes_to=Locality.RACK).full_detail
        'best server has 6; relaxes to rack in 4 min'
        """
        if self.relaxes_to is None or math.isinf(self.holds_seconds):
            return self.detail
        return f"{self.detail}; relaxes to {self.relaxes_to} in {format_duration(self.holds_seconds)}"

    def after(self, seconds: float) -> Refusal:
        """Return the refusal of a gang that has waited this much longer, or less if the time is negative."""
        if not seconds or (math.isinf(self.holds_seconds) and math.isinf(self.held_seconds)):
            return self
        held = max(0.0, self.held_seconds + seconds)
        return replace(self, holds_seconds=max(0.0, self.holds_seconds - seconds), held_seconds=held)

    @property
    def wait(self) -> Wait:
        """The kind of waiting that this reason causes.

        A job beyond its tenant's share waits for its fair share, whatever else holds it back; a job held back by
        something outside the cluster waits for that; and a job that can never run waits for capacity, which no fair
        share brings.
        """
        return wait_of(self.code, over_share=self.over_share)

    def __str__(self) -> str:
        """Return the reason in one sentence."""
        return f"{self.code}: {self.full_detail}"


def wait_of(code: Code, *, over_share: bool) -> Wait:
    """Return the kind of waiting: fair share if over quota, fragmentation if unplaceable (Philly, section 3.1 [P]).

    >>> wait_of(Code.FRAGMENTED, over_share=False), wait_of(Code.FRAGMENTED, over_share=True)
    (<Wait.FRAGMENTATION: 'fragmentation'>, <Wait.FAIR_SHARE: 'fair_share'>)
    """
    kind = WAIT_OF[code]
    elsewhere = kind is Wait.DEPENDENCY or code is Code.NEVER_FITS
    return Wait.FAIR_SHARE if over_share and not elsewhere else kind


def format_duration(seconds: float) -> str:
    """Format a duration in its largest suitable unit, rounded up so that it has always passed by then.

    >>> format_duration(41.2), format_duration(240), format_duration(9000)
    ('42 s', '4 min', '3 h')
    """
    for unit, length, most in (("s", 1, 100), ("min", 60, 6000)):
        if seconds <= most:
            return f"{math.ceil(seconds / length - 1e-6)} {unit}"
    return f"{math.ceil(seconds / 3600)} h"


def about(seconds: float) -> str:
    """Format an approximate duration, rounded to nearest.

    >>> about(41.2), about(740), about(9000), about(200_000), about(900_000)
    ('41 s', '12 min', '2.5 h', '56 h', '10 days')
    """
    return " ".join(_rough(seconds))


def format_duration_range(low: float, high: float | None) -> str:
    """Format a range of durations; None: no known upper bound.

    >>> format_duration_range(480, 1800), format_duration_range(50, 7200), format_duration_range(480, None)
    ('8–30 min', '50 s–2 h', '8 min or more')
    """
    first = _rough(low)
    if high is None:
        return f"{' '.join(first)} or more"
    last = _rough(high)
    return f"{first[0]}–{' '.join(last)}" if first[1] == last[1] else f"{' '.join(first)}–{' '.join(last)}"


def _rough(seconds: float) -> tuple[str, str]:
    for unit, length, most in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 3 * 86_400)):
        if seconds < most:
            count = seconds / length
            return f"{round(count, 1) if unit == 'h' and count < 10 else round(count):g}", unit
    return f"{round(seconds / 86_400):g}", "days"


def behind(job_id: str, wanted: str) -> Refusal:
    """Return the refusal of a job behind the head of a strict queue: the head does not fit, and no job may pass it."""
    return Refusal(
        Code.BEHIND,
        f"waits behind {job_id}, which is at the head of a strict queue and {wanted}",
        "the job at the head starts, or the queue is set to backfill",
    )


@dataclass(frozen=True, slots=True)
class PrecedingJob:
    """The job right before another one in the order, and their scores: the lower runs first.

    `wanted_milli` are the GPUs, in thousandths, requested by all jobs that wait before that other job.
    """

    job_id: str
    score: float
    own_score: float
    wanted_milli: int


def outranked(
    rank: int,
    ahead: int,
    first: Sequence[str] = (),
    left: Resources | None = None,
    nearest: PrecedingJob | None = None,
) -> Refusal:
    """Return the refusal of a job whose resources go to jobs before it in the order: `first` are the first of these.

    `left` is what those jobs leave: GPUs in thousandths, cores, and memory in bytes; None if unknown.

    >>> outranked(7, 6, ["a", "b"], Resources(2000, 12, 2**30)).detail
    'is number 7 in the order; the jobs before it, first a and b, leave 2 GPUs, 12 cores and 1 GiB of memory'
    """
    who = f"the jobs before it, first {' and '.join(first)}," if first else "the jobs before it"
    numbers: dict[str, float] = {"rank": rank, "ahead": ahead}
    much = "leave too little of the cluster"
    if left is not None:
        much = f"leave {in_words(left)}"
        numbers |= _numbers("left", left)
    return Refusal(
        Code.OUTRANKED,
        f"is number {rank} in the order; {who} {much}{_nearness(ahead, nearest, numbers)}",
        "jobs before it finish, or fall in the order",
        numbers,
    )


def blocked_by_strict_head(
    rank: int,
    ahead: int,
    head: str,
    wanted: Resources,
    left: Resources,
    nearest: PrecedingJob | None,
) -> Refusal:
    """Return the refusal of a job behind the `head` of a strict order, which does not fit: the order stops there.

    >>> wanted, left = Resources(4000, 8, 2**31), Resources(2000, 12, 2**30)
    >>> refusal = blocked_by_strict_head(7, 6, "a", wanted, left, None)
    >>> refusal.detail.partition(", which ")[2]
    'needs 4 GPUs, 8 cores and 2 GiB of memory; the jobs before a leave 2 GPUs, 12 cores and 1 GiB of memory'
    >>> [refusal.numbers[name] for name in ("rank", "head_gpu_milli", "head_cores", "left_gpu_milli", "left_cores")]
    [7, 4000.0, 8.0, 2000, 12]
    """
    numbers: dict[str, float] = {"rank": rank, "ahead": ahead}
    numbers |= _numbers("left", left) | _numbers("head", map(float, wanted))
    return Refusal(
        Code.OUTRANKED,
        f"is number {rank} in a strict order that stops at {head}, which needs {in_words(wanted)}; the "
        f"jobs before {head} leave {in_words(left)}{_nearness(ahead, nearest, numbers)}",
        f"{head} finds room, is cancelled or falls in the order, or the queue is set to backfill",
        numbers,
    )


def _numbers(prefix: str, amounts: Iterable[float]) -> dict[str, float]:
    """Return the numbers of a refusal for amounts of all resources."""
    kinds = zip(KINDS, amounts, strict=True)
    return {f"{prefix}_{kind.name}": amount for kind, amount in kinds if amount or not kind.optional}


def _nearness(ahead: int, nearest: PrecedingJob | None, numbers: dict[str, float]) -> str:
    """Describe how much waits before a job and how close the next job is; adds the numbers."""
    if nearest is None or not ahead:
        return ""
    numbers |= {"ahead_gpu_milli": nearest.wanted_milli, "score": nearest.own_score, "nearest_score": nearest.score}
    who = "1 waiting job before it wants" if ahead == 1 else f"{ahead} waiting jobs before it want"
    score, own_score = f"{nearest.score:.6g}", f"{nearest.own_score:.6g}"
    scores = f"has score {score}, this job {own_score}" if score != own_score else "has nearly the same score"
    return f"; {who} {gpus(nearest.wanted_milli)}; the nearest, {nearest.job_id}, {scores}"


def given_up(policy: str) -> Refusal:
    """Return the refusal of a job that the queue policy will not run."""
    return Refusal(
        Code.GIVEN_UP,
        f"was given up by the queue policy {policy}, which no longer sees any use in running it",
        "a later deadline, or policy options that give up no job",
    )


HELD_NAMED_MAX = 3


def nodes_held(held: Sequence[HeldNode], wanted: str) -> Refusal:
    """Return the refusal of a job that only held nodes could hold; these try one job at a time.

    >>> nodes_held([HeldNode("n1", "cannot launch: the disk is full", 8.0)], "1 GPU").detail
    'needs 1 GPU, and 1 server that could hold it is held: n1 (cannot launch: the disk is full); next try in 8 s'
    """
    named = ", ".join(f"{one.node_id} ({one.reason})" for one in held[:HELD_NAMED_MAX])
    more = f" and {len(held) - HELD_NAMED_MAX} more" if len(held) > HELD_NAMED_MAX else ""
    wait = min((one.next_seconds for one in held if not one.canary), default=math.inf)
    if math.isinf(wait):
        when = f"{held[0].canary} is being tried there"
    else:
        when = f"next try in {format_duration(wait)}" if wait > 0 else "the next job that fits is tried there"
    which = "server that could hold it is held" if len(held) == 1 else "servers that could hold it are held"
    numbers = {"held_nodes": float(len(held))}
    if not math.isinf(wait):
        numbers["next_canary_seconds"] = wait
    return Refusal(
        Code.NODES_HELD,
        f"needs {wanted}, and {len(held)} {which}: {named}{more}; {when}",
        "repair the nodes; the first job launched there ends the hold, or `cotenant uncordon` ends it at once",
        numbers,
    )


def policy_failed(policy: str, error: Exception) -> Refusal:
    """Return the refusal of a job on which the placement policy failed: it raised, or offered what is not free."""
    return Refusal(
        Code.POLICY_FAILED,
        f"the placement policy {policy} failed on it: {type(error).__name__}: {str(error)[:300]}",
        "fix the policy, or choose another one",
    )


def begins_later(begin_seconds: float) -> Refusal:
    """Return the refusal of a job whose begin time, in unix seconds, is still to come.

    >>> begins_later(1893456000.0).detail
    'begins at 2030-01-01T00:00:00Z'
    """
    at = datetime.fromtimestamp(begin_seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return Refusal(Code.BEGIN_TIME, f"begins at {at}", "the time passes", {"begin_seconds": begin_seconds})


def lacks_secrets(tenant: str, names: Sequence[str]) -> Refusal:
    """Return the refusal of a job that names secrets which its tenant does not have.

    >>> lacks_secrets("lab", ["HF_TOKEN"]).detail
    'tenant lab has no secret HF_TOKEN'
    """
    return Refusal(
        Code.SECRETS,
        f"tenant {tenant} has no {'secret' if len(names) == 1 else 'secrets'} {_named(names)}",
        f"`cotenant secrets set {names[0]} --tenant {tenant}` sets it",
        {"missing_secrets": float(len(names))},
    )


AWAITED_NAMED_MAX = 5
_WANTED: Mapping[Condition, str] = MappingProxyType(
    {
        Condition.AFTER_OK: "succeed",
        Condition.AFTER_FAIL: "fail",
        Condition.AFTER: "end",
        Condition.AFTER_STARTED: "start",
    }
)


def awaits(others: Mapping[Condition, Sequence[str]]) -> Refusal:
    """Return the refusal of a job with open dependencies: `others` lists, by condition, the jobs and their phases.

    >>> awaits({Condition.AFTER_OK: ["a (running)", "b (queued)"], Condition.AFTER: ["c (queued)"]}).detail
    'waits for 2 jobs to succeed: a (running), b (queued); for 1 job to end: c (queued)'
    """
    parts = [
        f"for {plural(len(others[condition]), 'job')} to {wanted}: {_named(others[condition])}"
        for condition, wanted in _WANTED.items()
        if others.get(condition)
    ]
    numbers = {f"left_{condition}": float(len(names)) for condition, names in others.items() if names}
    remedy = "those jobs start or finish as required; or cancel this job and submit it without them"
    return Refusal(Code.DEPENDENCY, f"waits {'; '.join(parts)}", remedy, numbers)


def _named(names: Sequence[str]) -> str:
    more = len(names) - AWAITED_NAMED_MAX
    return ", ".join([*names[:AWAITED_NAMED_MAX], *([f"and {more} more"] if more > 0 else [])])


def array_full(array_id: str, running_max: int, holding: int, waiting: int) -> Refusal:
    """Return the refusal of a job whose array already runs as many jobs as its limit allows."""
    return Refusal(
        Code.ARRAY_LIMIT,
        f"array {array_id} runs at most {running_max} of its jobs at once: {holding} hold resources, {waiting} wait",
        "other jobs of the array end",
        {"running_max": running_max, "holding": holding, "waiting": waiting},
    )
