"""Whether a job is retried after a failure, when, and which node it avoids.

Philly's third guideline [P]: fail early, retry wisely. Many of its failures recurred as often as the job was retried,
so a user's own error is not retried at all. Infrastructure failures are retried on a budget of their own, which does
not count against the user's. Failures of unknown responsibility are retried as the user specified.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.failures.classifier import Failure
from cotenant.core.failures.rules import Responsibility


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How failures are retried.

    back_off_seconds: the wait before the first retry of a transient failure; it doubles with each further one.
    back_off_seconds_max: the longest wait.
    infrastructure_retries: this many retries of infrastructure failures do not count against the job's own.
    avoid_seconds: how long a job avoids a node that was at fault.
    untold_back_off_seconds, untold_back_off_seconds_max: the same waits if nothing indicates that waiting helps.
    """

    back_off_seconds: float = 10.0
    back_off_seconds_max: float = 600.0
    infrastructure_retries: int = 3
    avoid_seconds: float = 3600.0
    untold_back_off_seconds: float = 1.0
    untold_back_off_seconds_max: float = 300.0


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a job has failed before: against its own `retries_max`, and because of the infrastructure."""

    failures: int
    retries_max: int
    infrastructure_failures: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """What follows from a failure. `counts`: against the user's retries. `left` of those, or of the shared budget."""

    again: bool
    counts: bool
    wait_seconds: float = 0.0
    avoid_node_seconds: float = 0.0
    left: int = 0


def decide(failure: Failure, tries: Tries, rules: RetryRules, draw: float) -> Retry:
    """Return whether and when to retry; `draw`, from 0 to 1, spreads retries so that they do not all come at once.

    >>> oom = Failure("cpu_out_of_memory", Responsibility.USER)
    >>> decide(oom, Tries(failures=0, retries_max=5), RetryRules(), 0.5).again
    False
    >>> reset = Failure("network_error", Responsibility.INFRASTRUCTURE, transient=True)
    >>> decide(reset, Tries(failures=0, retries_max=0), RetryRules(), 0.0)
    Retry(again=True, counts=False, wait_seconds=5.0, avoid_node_seconds=0.0, left=2)
    """
    avoid = rules.avoid_seconds if failure.node_at_fault else 0.0
    if failure.blame is Responsibility.USER:
        return Retry(again=False, counts=True)
    machines = failure.blame is Responsibility.INFRASTRUCTURE and (failure.transient or failure.node_at_fault)
    spared = machines and tries.infrastructure_failures < rules.infrastructure_retries
    before = tries.failures + tries.infrastructure_failures if machines or failure.transient else tries.failures
    if failure.transient or failure.node_at_fault:
        wait = _back_off(rules.back_off_seconds, rules.back_off_seconds_max, before, draw)
    else:
        wait = _back_off(rules.untold_back_off_seconds, rules.untold_back_off_seconds_max, before, 1.0)
    if spared:
        left = rules.infrastructure_retries - tries.infrastructure_failures - 1
        return Retry(True, False, wait, avoid, left)
    again = tries.failures < tries.retries_max
    return Retry(again, True, wait if again else 0.0, avoid, max(0, tries.retries_max - tries.failures - 1))


def _back_off(first: float, most: float, before: int, draw: float) -> float:
    """Return a wait that doubles with each failure, between half of it and all of it."""
    return min(most, first * 2.0 ** min(before, 60)) * (0.5 + 0.5 * draw)
