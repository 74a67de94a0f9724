"""How the queue is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cotenant.core.failures.retry import RetryRules
from cotenant.core.scheduling.admission import SHARING, Rules
from cotenant.services.queue.estimates.observation_sink import WINDOW_SECONDS
from cotenant.services.queue.jobs.transitions import RETRYING
from cotenant.store.capacity import NO_LIMITS, StoreLimits
from cotenant.store.compaction import KEPT_SECONDS

ENDED_KEPT_MAX = 20_000
ENDED_KEPT_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """How the queue is run."""

    policy: str = "fifo"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by policy
    debounce_seconds: float = 0.003
    rules: Rules = SHARING
    seed: int = 0
    ended_kept_max: int = ENDED_KEPT_MAX
    ended_kept_seconds: float = ENDED_KEPT_SECONDS
    history_seconds: float = KEPT_SECONDS  # of what the store was: a watch that was away for less goes on
    archive: Path | None = None  # the SQLite file into which ended jobs are written before they are forgotten
    retrying: RetryRules = RETRYING
    failure_rules: str = ""  # a file of the operator's, whose rules come before those that are shipped
    window_seconds: float = WINDOW_SECONDS  # over which the rates of running jobs are seen
    tenant_jobs_max: int = 0  # of a tenant, that have not ended; 0: any number
    tenant_bytes_max: int = 0  # of the store, for the jobs of a tenant that has no limit of its own; 0: a quarter of it
    store_limits: StoreLimits = NO_LIMITS
