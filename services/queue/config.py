"""Configuration of the queue service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cotenant.core.failures.retry import RetryRules
from cotenant.core.scheduling.admission import SHARING, Rules
from cotenant.services.queue.estimates.observation_sink import WINDOW_SECONDS
from cotenant.services.queue.folders.folder_store import NO_FOLDERS, FolderRules
from cotenant.services.queue.jobs.transitions import RETRY_RULES_DEFAULT
from cotenant.services.queue.notifications.rules import OFF, NotificationRules
from cotenant.store.capacity import NO_LIMITS, StoreLimits
from cotenant.store.compaction import HISTORY_SECONDS

ENDED_KEPT_MAX = 20_000
ENDED_KEPT_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Configuration of the queue service."""

    policy: str = "fifo"
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by policy name
    allocator: str = ""  # the CPU allocator, which may resize elastic jobs; "": none does
    allocator_options: Mapping[str, str] = field(default_factory=dict)
    debounce_seconds: float = 0.003
    rules: Rules = SHARING
    seed: int = 0
    ended_kept_max: int = ENDED_KEPT_MAX
    ended_kept_seconds: float = ENDED_KEPT_SECONDS
    history_seconds: float = HISTORY_SECONDS  # of store revisions; a watch that was disconnected for less resumes
    archive: Path | None = None  # SQLite file to which ended jobs are written before they are deleted
    retrying: RetryRules = RETRY_RULES_DEFAULT
    failure_rules: str = ""  # the operator's rules file; its rules precede the shipped ones
    window_seconds: float = WINDOW_SECONDS  # over which rates of running jobs are measured
    tenant_jobs_max: int = 0  # unfinished jobs per tenant; 0: unlimited
    tenant_bytes_max: int = 0  # store budget of a tenant without a limit of its own; 0: a quarter of the store
    store_limits: StoreLimits = NO_LIMITS
    notifications: NotificationRules = OFF
    folders: FolderRules = NO_FOLDERS
    secret_keys: Path | None = None  # the file of keys that encrypt secrets; None: no secrets are kept
