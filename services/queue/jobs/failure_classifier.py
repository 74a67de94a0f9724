"""What kind of failure ended an attempt: read once, when its end comes, and kept with the attempt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import structlog

import cotenant.core.failures
from cotenant import telemetry
from cotenant.core.failures.classifier import UNCLASSIFIED, End, Failure, classify
from cotenant.core.failures.retry import RetryRules
from cotenant.core.failures.rules import BadRules, Blame, Rule, merged, parse_rules
from cotenant.core.model.health import HOLDING
from cotenant.core.model.health_rules import RULES, xid_rule
from cotenant.v1 import job_pb2

log = structlog.get_logger()

SUSPECT_JOBS, SUSPECT_SECONDS = 3, 3600.0  # so many jobs for whose failure one node was at fault, within that time
SUSPECTS_MAX = 10_000
FOR_HEALTH = "stopped for its node's health: "  # rules know it by that

FAILED = telemetry.counter("cotenant.queue.failures", "{attempt}", "Attempts that failed, by class and blame.")

BLAMES = {
    Blame.UNKNOWN: job_pb2.FAILURE_BLAME_UNSPECIFIED,
    Blame.USER: job_pb2.FAILURE_BLAME_USER,
    Blame.INFRASTRUCTURE: job_pb2.FAILURE_BLAME_INFRASTRUCTURE,
}
_BLAMES = {number: blame for blame, number in BLAMES.items()}
_WHOSE = {Blame.UNKNOWN: "", Blame.USER: ", the job's own", Blame.INFRASTRUCTURE: ", the machines'"}


def read_rules(own: str = "") -> tuple[Rule, ...]:
    """Read the rules that are shipped, and before them those of a file of the operator's.

    Raises:
        BadRules: naming the file, the line and the field.
    """
    rules = _shipped()
    if not own:
        return rules
    try:
        text = Path(own).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRules(f"cannot read {own}: {getattr(error, 'strerror', None) or error}") from None
    return merged(parse_rules(text, own), rules)


@cache
def _shipped() -> tuple[Rule, ...]:
    """Read the shipped rules, once: a queue is made anew whenever this process begins to lead."""
    shipped = Path(cotenant.core.failures.__file__).with_name("rules.toml")
    return parse_rules(shipped.read_text(encoding="utf-8"), shipped.name)


class Failing:
    """Classifies failures, and notices nodes that are at fault again and again."""

    def __init__(self, rules: Sequence[Rule], retrying: RetryRules) -> None:
        self.rules, self.retrying = tuple(rules), retrying
        self._faults: dict[str, deque[tuple[float, str]]] = {}  # by node: when, and of which job

    def classified(self, attempt: job_pb2.Attempt) -> job_pb2.Attempt:
        """Give an attempt that has ended as it is to be kept: with its failure, without what that was read from."""
        kept = job_pb2.Attempt()
        kept.CopyFrom(attempt)
        kept.ClearField("output_tail")
        kept.ClearField("signs")
        if broke(attempt):
            unwell = attempt.stop_reason == job_pb2.STOP_REASON_UNHEALTHY and attempt.stop_detail
            end = End(
                attempt.exit.code,
                attempt.exit.signal,
                attempt.exit.out_of_memory,
                f"{FOR_HEALTH}{attempt.stop_detail}" if unwell else attempt.message,
                attempt.output_tail,
                attempt.signs,
            )
            kept.failure.CopyFrom(to_wire(spare_node(classify(end, self.rules), attempt.signs)))
        return kept

    def note(self, attempt: job_pb2.Attempt) -> None:
        """Count a failure that was taken in."""
        if not attempt.HasField("failure"):
            return
        failure = from_wire(attempt.failure)
        FAILED.add(failure_class=failure.failure_class, blame=failure.blame.value)
        if failure.node_at_fault and attempt.exit.node_id:
            self._suspect(attempt.exit.node_id, attempt.job_id, failure)

    def _suspect(self, node_id: str, job_id: str, failure: Failure) -> None:
        now = time.time()
        faults = self._faults.setdefault(node_id, deque(maxlen=SUSPECTS_MAX))
        faults.append((now, job_id))
        while faults and faults[0][0] < now - SUSPECT_SECONDS:
            faults.popleft()
        jobs = {one for _, one in faults}
        if len(jobs) >= SUSPECT_JOBS:
            log.warning("node_fails_jobs", node=node_id, jobs=len(jobs), failure=failure.failure_class)


def spare_node(failure: Failure, signs: Iterable[str]) -> Failure:
    """Return a failure without blame for its node where one GPU is to blame and is held: its other GPUs are well.

    >>> ecc = Failure("gpu_ecc_error", Blame.INFRASTRUCTURE, "cuda-ecc", "uncorrectable ECC error", True, True)
    >>> spare_node(ecc, ["xid 48 on GPU-6f1c"]).node_at_fault, spare_node(ecc, ["xid 13 on GPU-6f1c"]).node_at_fault
    (False, True)
    """
    if failure.node_at_fault and any(_holds_gpu(sign) for sign in signs):
        return replace(failure, node_at_fault=False)
    return failure


def _holds_gpu(sign: str) -> bool:
    """Whether a sign of a node's health tells of a GPU that gets no work for it: see `core.health.Finding.sign`."""
    what, _, uuid = sign.partition(" on ")
    number = what.removeprefix("xid ")
    if what.startswith("xid ") and number.isdecimal() and len(number) < 5:
        return xid_rule(int(number)).action in HOLDING
    rule = RULES.get(what.replace(" ", "_"))
    return bool(uuid) and rule is not None and rule.action in HOLDING


def broke(attempt: job_pb2.Attempt) -> bool:
    """Whether an attempt failed: by itself, or stopped though nobody wanted that."""
    if attempt.state == job_pb2.ATTEMPT_STATE_FAILED:
        return True
    return attempt.state == job_pb2.ATTEMPT_STATE_STOPPED and attempt.stop_reason in (
        job_pb2.STOP_REASON_UNSPECIFIED,
        job_pb2.STOP_REASON_GANG_BROKEN,
        job_pb2.STOP_REASON_UNHEALTHY,
    )


def failure(attempt: job_pb2.Attempt) -> str:
    """Say in one sentence how an attempt failed."""
    end = attempt.exit
    where = f" (rank {end.rank} on {end.node_id})" if end.node_id else ""
    if end.out_of_memory:
        return f"killed by the kernel: out of memory{where}"
    if attempt.message:
        return f"{attempt.message}{where}"
    if end.signal:
        return f"killed by signal {end.signal}{where}"
    return f"exited with status {end.code}{where}"


def to_wire(failure: Failure) -> job_pb2.Failure:
    """Write a failure as a message."""
    message = job_pb2.Failure(
        blame=BLAMES[failure.blame],
        rule=failure.rule,
        evidence=failure.evidence,
        transient=failure.transient,
        node_at_fault=failure.node_at_fault,
    )
    setattr(message, "class", failure.failure_class)
    return message


def from_wire(message: job_pb2.Failure) -> Failure:
    """Read a failure from a message; one that is not set is unclassified."""
    return Failure(
        getattr(message, "class") or UNCLASSIFIED,
        _BLAMES.get(message.blame, Blame.UNKNOWN),
        message.rule,
        message.evidence,
        message.transient,
        message.node_at_fault,
    )


def in_words(failure: Failure) -> str:
    """Tell a failure in a few words; "" where nothing is known of it.

    >>> in_words(Failure("import_error", Blame.USER, "import", "ImportError: x"))
    "import error, the job's own: ImportError: x"
    """
    if not failure.rule:
        return ""
    return f"{failure.failure_class.replace('_', ' ')}{_WHOSE[failure.blame]}: {failure.evidence}"
