"""Limits on the content of requests: one table, used by validation, servers and the documentation.

A limit keeps one call from blocking a service's event loop, and one job from filling a record. An error names the
field, its value and the limit. `docs/limits.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024

NAME_LENGTH_MAX = 253
ROLES_MAX = 16
REPLICAS_MAX = 4096
LABELS_MAX = 64
TEXT_BYTES_MAX = 128 * KIB  # command and environment together
COMMAND_WORDS_MAX = 4096
ENVIRONMENT_MAX = 1024
PATH_LENGTH_MAX = 4096
REGEX_LENGTH_MAX = 1024
DEPENDENCIES_MAX = 100
SECRETS_MAX = 32
MOUNTS_MAX = 32  # of a container
SPEC_BYTES_MAX = 256 * KIB
ARRAY_BYTES_MAX = 64 * KIB * KIB  # over all jobs of an array

TEXT_LENGTH_MAX = 4096
ITEMS_MAX = 10_000
FILTER_IDS_MAX = 10_000
FILTER_PHASES_MAX = 32
FILTER_LABELS_MAX = 64
MASK_PATHS_MAX = 64
SIMULATED_MAX = 100
PLAN_CANDIDATES_MAX = 2_000
FORECAST_CANDIDATES_MAX = 2_000
FORECAST_RUNS_MAX = 20_000
ADVICE_MAX = 10_000
REPLICA_RESIZES_MAX = 100
OBSERVATIONS_MAX = 10_000
QUERIES_MAX = 10_000
TENANTS_MAX = 10_000

VIOLATIONS_MAX = 32  # of one request; the rest are counted
REQUEST_BYTES_MAX = 64 * KIB
REQUEST_SPEC_BYTES_MAX = 320 * KIB
REQUEST_SPECS_BYTES_MAX = 512 * KIB
REQUEST_DIGESTS_BYTES_MAX = 384 * KIB  # of 10,000 digests
REQUEST_SECRET_BYTES_MAX = 72 * KIB
REQUEST_CHUNKS_BYTES_MAX = 3 * KIB * KIB + 64 * KIB
REQUEST_SNAPSHOT_BYTES_MAX = 3 * KIB * KIB + 64 * KIB


@dataclass(frozen=True, slots=True)
class Limit:
    """The maximum that a field may hold."""

    field: str
    most: int
    unit: str
    about: str


_LIMITS = (
    Limit("spec", SPEC_BYTES_MAX, "bytes", "A job as it is sent."),
    Limit("spec.name", NAME_LENGTH_MAX, "characters", "Also of models, GPU types, labels' keys and values, job ids."),
    Limit("spec.labels", LABELS_MAX, "labels", "Of a job."),
    Limit("spec.roles", ROLES_MAX, "roles", "Of a job."),
    Limit("spec.roles[].replicas", REPLICAS_MAX, "replicas", "Of all roles of a job together."),
    Limit("spec.command", COMMAND_WORDS_MAX, "words", "Of a job and of each of its roles."),
    Limit("spec.environment", ENVIRONMENT_MAX, "variables", "Of a job."),
    Limit("spec.command and environment", TEXT_BYTES_MAX, "bytes", "Of all roles, with names and values."),
    Limit("spec.working_directory", PATH_LENGTH_MAX, "characters", "As long as Linux takes."),
    Limit("spec.submit_directory.path", PATH_LENGTH_MAX, "characters", "As long as Linux takes."),
    Limit("spec.python_environment.path", PATH_LENGTH_MAX, "characters", "And of its interpreter."),
    Limit("spec.progress.regex", REGEX_LENGTH_MAX, "characters", "In RE2's syntax."),
    Limit("spec.dependencies", DEPENDENCIES_MAX, "dependencies", "Jobs and arrays that a job waits for."),
    Limit("spec.array", ARRAY_BYTES_MAX, "bytes", "The spec times the number of jobs of the array."),
    Limit("spec.secrets", SECRETS_MAX, "secrets", "That a job names."),
    Limit("spec.container.mounts", MOUNTS_MAX, "mounts", "Of a job's container."),
    Limit("filter.ids", FILTER_IDS_MAX, "ids", "Of a list or a watch."),
    Limit("filter.phases", FILTER_PHASES_MAX, "phases", "Of a list or a watch."),
    Limit("filter.labels", FILTER_LABELS_MAX, "labels", "Of a list or a watch."),
    Limit("update_mask.paths", MASK_PATHS_MAX, "paths", "Of one update."),
    Limit("more", SIMULATED_MAX, "jobs", "That one `SimulateJob` asks about beside its first."),
    Limit("text", TEXT_LENGTH_MAX, "characters", "Of any id, name, reason or page token in a request."),
    Limit("items", ITEMS_MAX, "items", "Of any repeated field of a request that is not named here."),
    Limit("violations", VIOLATIONS_MAX, "violations", "Named in one error; the others are counted."),
    Limit("request", REQUEST_BYTES_MAX, "bytes", "Of a call by people, but for those that carry jobs."),
    Limit(
        "request with a job",
        REQUEST_SPEC_BYTES_MAX,
        "bytes",
        "`CreateJob`, `CreateArray`, `UpdateJob`, `CreateSchedule`.",
    ),
    Limit("request with jobs", REQUEST_SPECS_BYTES_MAX, "bytes", "`SimulateJob`."),
    Limit("request with digests", REQUEST_DIGESTS_BYTES_MAX, "bytes", "`FindMissingChunks`."),
    Limit("request with chunks", REQUEST_CHUNKS_BYTES_MAX, "bytes", "`WriteChunks`."),
    Limit("request with a snapshot", REQUEST_SNAPSHOT_BYTES_MAX, "bytes", "`PlanJobs`; the snapshot may have 3 MiB."),
    Limit("request with a secret", REQUEST_SECRET_BYTES_MAX, "bytes", "`SetSecret`; its value may have 64 KiB."),
    Limit("candidates of a plan", PLAN_CANDIDATES_MAX, "jobs", "Between services: `PlanPlacement`."),
    Limit("candidates of a forecast", FORECAST_CANDIDATES_MAX, "jobs", "Between services: `ForecastStarts`."),
    Limit("runs of a forecast", FORECAST_RUNS_MAX, "attempts", "Between services: `ForecastStarts`."),
    Limit("advice", ADVICE_MAX, "attempts", "Between services: `AdviseAttempts`."),
    Limit("resizes", REPLICA_RESIZES_MAX, "jobs", "Between services: `ResizeReplicas`."),
    Limit("observations", OBSERVATIONS_MAX, "observations", "Between services: `Observe`."),
    Limit("queries", QUERIES_MAX, "queries", "Between services: `Estimate`."),
)
LIMITS: Mapping[str, Limit] = {limit.field: limit for limit in _LIMITS}
