"""Classifies the failure of an attempt: once, when it ends; the class is stored with the attempt."""

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
from cotenant.core.failures.classifier import UNCLASSIFIED, AttemptEnd, Failure, classify
from cotenant.core.failures.retry import RetryRules
from cotenant.core.failures.rules import BadRules, Responsibility, Rule, merged, parse_rules
from cotenant.core.model.health import HOLDING
from cotenant.core.model.health_rules import RULES, xid_rule
from cotenant.internal.v1.attempt_pb2 import AttemptEvidence
from cotenant.v1 import job_pb2

log = structlog.get_logger()

SUSPECT_JOBS, SUSPECT_SECONDS = 3, 3600.0  # a node is suspected after failing this many jobs within this time
SUSPECTS_MAX = 10_000
UNHEALTHY_PREFIX = "stopped for its node's health: "  # rules match this prefix

FAILED = telemetry.counter("cotenant.queue.failures", "{attempt}", "Failed attempts, by class and responsibility.")

BLAMES = {
    Responsibility.UNKNOWN: job_pb2.FAILURE_BLAME_UNSPECIFIED,
    Responsibility.USER: job_pb2.FAILURE_BLAME_USER,
    Responsibility.INFRASTRUCTURE: job_pb2.FAILURE_BLAME_INFRASTRUCTURE,
}
_BLAME_OF_WIRE = {number: blame for blame, number in BLAMES.items()}
_OWNER = {
    Responsibility.UNKNOWN: "",
    Responsibility.USER: " (user)",
    Responsibility.INFRASTRUCTURE: " (infrastructure)",
}


def read_rules(own: str = "") -> tuple[Rule, ...]:
    """Return the operator's rules from a file, if any, followed by the shipped rules.

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
    """Return the shipped rules. Cached: a new queue is made for every term as leader."""
    shipped = Path(cotenant.core.failures.__file__).with_name("rules.toml")
    return parse_rules(shipped.read_text(encoding="utf-8"), shipped.name)


class FailureClassifier:
    """Classifies failures, and reports nodes that repeatedly fail jobs."""

    def __init__(self, rules: Sequence[Rule], retrying: RetryRules) -> None:
        self.rules, self.retrying = tuple(rules), retrying
        self._faults: dict[str, deque[tuple[float, str]]] = {}  # by node: time and job of each fault

    def classify_attempt(self, attempt: job_pb2.Attempt, evidence: AttemptEvidence) -> job_pb2.Attempt:
        """Return an ended attempt as it is stored: if it failed, with the failure's class."""
        kept = job_pb2.Attempt()
        kept.CopyFrom(attempt)
        if attempt.stop_reason == job_pb2.STOP_REASON_TIME_LIMIT and is_failure(attempt):
            end = AttemptEnd(message=attempt.stop_detail)  # whatever else was observed, the limit ended it
            kept.failure.CopyFrom(to_wire(classify(end, self.rules)))
        elif is_failure(attempt):
            unwell = attempt.stop_reason == job_pb2.STOP_REASON_UNHEALTHY and attempt.stop_detail
            end = AttemptEnd(
                attempt.exit.code,
                attempt.exit.signal,
                attempt.exit.out_of_memory,
                f"{UNHEALTHY_PREFIX}{attempt.stop_detail}" if unwell else attempt.message,
                evidence.output_tail,
                evidence.signs,
            )
            kept.failure.CopyFrom(to_wire(clear_node_fault(classify(end, self.rules), evidence.signs)))
        return kept

    def count_failure(self, attempt: job_pb2.Attempt) -> None:
        """Count a stored failure."""
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
            log.warning("node_suspected", node=node_id, jobs=len(jobs), failure=failure.failure_class)


def clear_node_fault(failure: Failure, signs: Iterable[str]) -> Failure:
    """Return a failure without node fault if it comes from one GPU that is held: the node's other GPUs are healthy.

    >>> ecc = Failure("gpu_ecc_error", Responsibility.INFRASTRUCTURE, "cuda-ecc", "uncorrectable ECC error", True, True)
    >>> clear_node_fault(ecc, ["xid 48 on GPU-6f1c"]).node_at_fault
    False
    >>> clear_node_fault(ecc, ["xid 13 on GPU-6f1c"]).node_at_fault
    True
    """
    if failure.node_at_fault and any(_holds_gpu(sign) for sign in signs):
        return replace(failure, node_at_fault=False)
    return failure


def _holds_gpu(sign: str) -> bool:
    """Return whether a health sign leads to a GPU being held: see `core.model.health.Finding.sign`."""
    what, _, uuid = sign.partition(" on ")
    number = what.removeprefix("xid ")
    if what.startswith("xid ") and number.isdecimal() and len(number) < 5:
        return xid_rule(int(number)).action in HOLDING
    rule = RULES.get(what.replace(" ", "_"))
    return bool(uuid) and rule is not None and rule.action in HOLDING


def is_failure(attempt: job_pb2.Attempt) -> bool:
    """Return whether an attempt failed: by itself, or stopped although no stop was requested."""
    if attempt.state == job_pb2.ATTEMPT_STATE_FAILED:
        return True
    return attempt.state == job_pb2.ATTEMPT_STATE_STOPPED and attempt.stop_reason in (
        job_pb2.STOP_REASON_UNSPECIFIED,
        job_pb2.STOP_REASON_GANG_BROKEN,
        job_pb2.STOP_REASON_UNHEALTHY,
        job_pb2.STOP_REASON_TIME_LIMIT,
    )


def failure(attempt: job_pb2.Attempt) -> str:
    """Describe in one sentence how an attempt failed."""
    if attempt.stop_reason == job_pb2.STOP_REASON_TIME_LIMIT and attempt.stop_detail:
        return attempt.stop_detail
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
    """Encode a failure."""
    return job_pb2.Failure(
        failure_class=failure.failure_class,
        blame=BLAMES[failure.blame],
        rule=failure.rule,
        evidence=failure.evidence,
        transient=failure.transient,
        node_at_fault=failure.node_at_fault,
    )


def from_wire(message: job_pb2.Failure) -> Failure:
    """Decode a failure; an unset one is unclassified."""
    return Failure(
        message.failure_class or UNCLASSIFIED,
        _BLAME_OF_WIRE.get(message.blame, Responsibility.UNKNOWN),
        message.rule,
        message.evidence,
        message.transient,
        message.node_at_fault,
    )


def in_words(failure: Failure) -> str:
    """Describe a failure in a few words; "" if nothing is known of it.

    >>> in_words(Failure("import_error", Responsibility.USER, "import", "ImportError: x"))
    'import error (user): ImportError: x'
    """
    if not failure.rule:
        return ""
    return f"{failure.failure_class.replace('_', ' ')}{_OWNER[failure.blame]}: {failure.evidence}"
