"""The table of job fields: one row for each attribute of a job that is a single value.

Derived from a row: how the value is validated, encoded and decoded; its key in job files, read and written; its flag
and help; how `cotenant show` prints it; whether `cotenant update` changes it; and its line in docs/job-fields.md.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any

from cotenant.core.model import patterns
from cotenant.core.model.field_limits import (
    FINITE,
    ID,
    NAME,
    NOT_NEGATIVE,
    PATH,
    PERCENTILE,
    TEXT_PATH,
    ZERO_OR_POSITIVE,
    Limit,
    at_least,
    between,
    positive,
    shown,
)
from cotenant.core.model.image_reference import IMAGE
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.limits import REPLICAS_MAX
from cotenant.core.model.resources import AMOUNT_KINDS

DISCONNECTED_SECONDS_MIN = 10.0  # less would stop jobs when the control plane restarts
PRE_RUN_SECONDS_MAX = 86_400.0
TIME_LIMIT_DAYS_MAX = 366
PIDS_MIN, PIDS_MAX = 16, 4_194_304  # Linux's maximum
GRACE_SECONDS_MAX = 24 * 3600.0
RETRIES_MAX = 1000
PRIORITY_MAX = 1_000_000

DEFAULT = JobSpec()
_SIGNALS = frozenset(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}


class FieldType(StrEnum):
    """The type of a field: how users write it."""

    TEXT = "text"
    INTEGER = "whole number"
    NUMBER = "number"
    BOOLEAN = "true or false"
    DURATION = "duration"
    TIME = "time"
    SIZE = "size"
    GPUS = "GPUs"
    CORES = "cores"
    REPLICAS = "replicas"
    RESIZE_MODE = "restart or in-place"
    BATCH_SCALING = "strong or weak"
    KIND = "kind"
    LOCALITY = "topology level"
    SPREAD_BY = "node or rack"
    OBJECTIVE_CHECK = "require, warn or ignore"
    PRIORITY = "priority"
    SIGNAL = "signal"
    PROFILE = "auto or never"
    INDICES = "indices"
    PAIRS = "map of texts"
    TEXTS = "list of texts"
    TRIGGERS = "list of events"
    JOBS = "jobs"
    ENVIRONMENT = "auto, venv, conda, uv or none"
    COMMAND = "words or shell command"


@dataclass(frozen=True, slots=True)
class JobField:
    """A row of the table. Dots separate the names of nested fields.

    key: its name in job files.
    attribute: its name in `JobSpec`, or in `Role` or `Request`; the key, unless given.
    wire: its name on the wire; the attribute, unless given.
    metavar: of its flag; "" for none.
    flag: the name of its flag; the last part of the key, unless given.
    switch: whether its flag takes no value, and sets it to true.
    shown: its label in `cotenant show`, "" for none, and `shown_as` the text around the value.
    update: the help of its flag of `cotenant update`; "" for none.
    other_names: on the wire and in other schedulers, for suggestions.
    value_of: returns its value in a spec, or in a `Role` or `Request`.
    """

    key: str
    type: FieldType
    attribute: str = ""
    wire: str = ""
    limit: Limit | None = None
    help: str = ""
    metavar: str = ""
    flag: str = ""
    switch: bool = False
    shown: str = ""
    shown_as: str = "{}"
    update: str = ""
    other_names: tuple[str, ...] = ()
    value_of: Callable[[JobSpec | Role | Request], Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fill in the names that are not given."""
        object.__setattr__(self, "attribute", self.attribute or self.key)
        object.__setattr__(self, "wire", self.wire or self.attribute)
        object.__setattr__(self, "value_of", attrgetter(self.attribute))
        object.__setattr__(self, "flag", self.flag or self.key.rpartition(".")[2].replace("_", "-"))

    @property
    def default(self) -> Any:
        """Its value in a job that does not give it."""
        return self.value_of(DEFAULT)


def attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `JobSpec` for values by attribute.

    >>> attributes({"priority": 3, "qos.latency_seconds": 0.05})["qos"].latency_seconds
    0.05
    """
    found: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            nested.setdefault(outer, {})[inner] = value
        else:
            found[name] = value
    for outer, parts in nested.items():
        found[outer] = type(getattr(DEFAULT, outer))(**parts)
    return found


def _signal_error(name: str) -> str:
    return "" if name in _SIGNALS else f"must be a signal that can be caught, such as SIGUSR1, not {shown(name)}"


def _regex_error(pattern: str) -> str:
    return patterns.find_error(pattern) if pattern else ""


def _time_limit_error(seconds: float) -> str:
    if 0 < seconds <= TIME_LIMIT_DAYS_MAX * 86_400:
        return ""
    return f"must be above 0 and at most {TIME_LIMIT_DAYS_MAX} days, not {seconds:g} seconds"


_TIME_LIMIT = Limit(f"be above 0 and at most {TIME_LIMIT_DAYS_MAX} days", _time_limit_error)

T = FieldType
# fmt: off
# One row for each field, in the order of written job files.
JOB: tuple[JobField, ...] = (
    JobField("name", T.TEXT, limit=NAME, metavar="NAME", help="Display name; need not be unique.", update="New name."),
    JobField("kind", T.KIND, metavar="KIND",
        help="training, inference or cpu; default: training with GPUs, cpu without."),
    JobField("tenant", T.TEXT, limit=ID, metavar="ID", help="Tenant to charge."),
    JobField("queue", T.TEXT, limit=ID, metavar="ID", help="Queue."),
    JobField("priority", T.PRIORITY, limit=between(-PRIORITY_MAX, PRIORITY_MAX), metavar="CLASS|N",
        help="low, normal, high, urgent or a number; higher runs earlier.", shown="priority",
        update="low, normal, high, urgent or a number; higher runs earlier."),
    JobField("model", T.TEXT, limit=NAME, metavar="TAG", help="Model tag; jobs with the same tag share history.",
        shown="model"),
    JobField("steps", T.INTEGER, "steps_total", limit=NOT_NEGATIVE, metavar="N", help="Total number of steps.",
        update="Total number of steps; 0: unknown.", other_names=("steps_total",)),
    JobField("expected", T.DURATION, "expected_seconds", "expected_duration", limit=positive(" seconds"),
        metavar="DURATION", help="Expected run time.", other_names=("expected_duration",)),
    JobField("deadline", T.TIME, "deadline_seconds", "deadline", metavar="TIME",
        help="Deadline: 2h, 17:30, or 2030-01-31T18:00.", shown="deadline",
        update="Deadline: 2h, 17:30, or 2030-01-31T18:00; none removes it."),
    JobField("begin", T.TIME, "begin_seconds", "begin_time", metavar="TIME", shown="begins",
        help="Do not start before: +10m, 17:30, or 2030-01-31T18:00.", other_names=("begin_time", "starttime")),
    JobField("hold", T.BOOLEAN, switch=True, help="Suspend the job from the start, until `cotenant resume`.",
        shown="held at submission"),
    JobField("time_limit", T.DURATION, "time_limit_seconds", limit=_TIME_LIMIT, wire="time_limit",
        metavar="DURATION", flag="time", shown="time limit", shown_as="{} per attempt",
        help="Wall-clock limit of one attempt, grace included; the job then fails. Default: none.",
        update="New wall-clock limit of an attempt, from its start on.",
        other_names=("time", "timelimit", "walltime")),
    JobField("grace", T.DURATION, "grace_seconds", "grace", limit=between(0, GRACE_SECONDS_MAX, " seconds"),
        metavar="DURATION", help="Grace period between warning signal and kill; default 30s."),
    JobField("signal", T.SIGNAL, "warning_signal", limit=Limit("be a signal that can be caught", _signal_error),
        metavar="SIGNAL", help="Warning signal; default SIGTERM.", other_names=("warning_signal",)),
    JobField("retries", T.INTEGER, "retries_max", limit=between(0, RETRIES_MAX), metavar="N",
        help="How often a failed attempt is retried.", update="How often a failed attempt is retried.",
        other_names=("retries_max",)),
    JobField("preemptible", T.BOOLEAN, help="Whether the job may be preempted.", shown="preemptible",
        update="Whether the job may be preempted."),
    JobField("locality", T.LOCALITY, metavar="LEVEL",
        help="Topology level for all replicas: server, rack or anywhere."),
    JobField("spread.by", T.SPREAD_BY, metavar="node|rack", flag="spread-by", shown="spread over",
        help="What --spread counts: node (default) or rack."),
    JobField("spread.min", T.INTEGER, "spread.least", "spread.min", limit=between(1, REPLICAS_MAX, or_zero=True),
        metavar="N", flag="spread", shown="spread", shown_as="at least {}",
        help="Minimum number of different nodes, or racks, that the replicas are on."),
    JobField("profile", T.PROFILE, "profiled", metavar="auto|never",
        help="Whether the job may be profiled on fewer cores while it runs.", other_names=("profiled",)),
    JobField("best_effort", T.BOOLEAN, help="Uses idle CPU time: its CPU time may be throttled, not only its cores."),
    JobField("stop_after_disconnected", T.DURATION, "stop_after_disconnected_seconds", "stop_after_disconnected",
        limit=at_least(DISCONNECTED_SECONDS_MIN, " seconds"),
        help="Stops after its node has been disconnected from the control plane this long.",
        other_names=("stop_on_disconnect",)),
    JobField("pre_run", T.DURATION, "pre_run_seconds", "pre_run", limit=between(1, PRE_RUN_SECONDS_MAX, " seconds"),
        help="Rank 0 first runs alone on one GPU, at most this long.", shown="pre-run",
        shown_as="on one GPU first, at most {}"),
    JobField("pids", T.INTEGER, "pids_max", limit=between(PIDS_MIN, PIDS_MAX, or_zero=True),
        help="Processes and threads per replica; default: the node's limit.", other_names=("pids_max",)),
    JobField("progress.regex", T.TEXT, "progress_regex", "progress.regex",
        limit=Limit("be a regular expression in RE2's syntax", _regex_error), metavar="REGEX", flag="progress-regex",
        help="Reads the step from the output, such as 'step (\\d+)'.", shown="progress rule"),
    JobField("goal.loss", T.NUMBER, "loss_goal.target", limit=FINITE, help="Loss at which training is done."),
    JobField("goal.fall", T.NUMBER, "loss_goal.fall_min", limit=ZERO_OR_POSITIVE,
        help="Training is done when the loss falls by less than this within `goal.steps`."),
    JobField("goal.steps", T.INTEGER, "loss_goal.fall_steps", limit=NOT_NEGATIVE,
        help="Steps within which the loss must fall by `goal.fall`."),
    JobField("qos.rate", T.NUMBER, "qos.rate_min_per_second", limit=ZERO_OR_POSITIVE, metavar="N",
        help="Minimum rate in steps per second."),
    JobField("qos.latency", T.DURATION, "qos.latency_seconds", limit=ZERO_OR_POSITIVE, metavar="DURATION",
        help="Latency objective of a service, such as 50ms.", update="Latency objective of a service, such as 50ms."),
    JobField("qos.percentile", T.NUMBER, "qos.latency_percentile", limit=PERCENTILE, metavar="P",
        help="Percentile of the latency objective, such as 99.", update="Percentile of the latency objective."),
    JobField("qos.arrivals", T.NUMBER, "qos.arrivals_per_second", limit=ZERO_OR_POSITIVE, metavar="N",
        help="Requests per second over all replicas.", update="Requests per second."),
    JobField("objective_check", T.OBJECTIVE_CHECK, metavar="require|warn|ignore", shown="objective check",
        help="If its objectives cannot be kept: refuse the job, accept it with a warning (default), or do not check."),
    JobField("resize", T.RESIZE_MODE, metavar="restart|in-place", shown="resize",
        help="How a job with a range of replicas takes up another number: by a restart (default), or in place."),
    JobField("scale", T.BATCH_SCALING, metavar="strong|weak", shown="scale",
        help="Whether all replicas share one batch (strong, the default), or each has its own (weak)."),
    JobField("workdir", T.TEXT, "working_directory", limit=PATH, metavar="DIR",
        help="Working directory on the nodes; default: the current folder.", shown="working directory",
        other_names=("working_directory",)),
    JobField("upload", T.TEXT, limit=TEXT_PATH, metavar="DIR", shown="uploaded folder",
        help="Upload this folder, and start in a copy of it; . is the current one, and auto uploads it only if a node "
        "may not have it."),
    JobField("image", T.TEXT, "container.image", "container.image", limit=IMAGE, metavar="REF", shown="image",
        help="Run in a container of this image on the nodes: oci:DIR[:TAG], or dir:DIR for an unpacked one.",
        other_names=("container", "container_image")),
)

# Of `Role`, in job files beside those of `JOB` or in each entry of `roles`, where `role` is called `name`.
ROLE: tuple[JobField, ...] = (
    JobField("role", T.TEXT, "name", metavar="NAME", help="Role name of the replicas; default worker."),
    JobField("replicas", T.REPLICAS, metavar="N|MIN..MAX|auto",
        help="Processes that start together; MIN..MAX: an elastic training job's range; auto: as many as a service's "
        "objective needs."),
    JobField("replicas_min", T.INTEGER, "least", "open.min", metavar="N",
        help="Minimum for --replicas auto; default 1.", other_names=("min_replicas",)),
    JobField("replicas_max", T.INTEGER, "most", "open.max", metavar="N",
        help="Maximum for --replicas auto; default 64.", other_names=("max_replicas",)),
)

# Of a role's `Request`.
REQUEST: tuple[JobField, ...] = (
    JobField("gpus", T.GPUS, "gpu_milli", "resources.gpu_milli", metavar="N",
        help="GPUs per replica: 1, 8, or a fraction such as 0.5.", other_names=("gpu_milli",)),
    JobField("gpu_type", T.TEXT, "gpu_type", "resources.gpu_type", metavar="TYPE",
        help="GPU type, such as V100, or alternatives: 'V100|A100'."),
    JobField("cpus", T.CORES, "cores", "resources.cores", metavar="N|auto",
        help="Cores per replica; auto finds the useful number.", other_names=("cores", "cpu")),
    *(
        JobField(kind.key, T.SIZE, kind.name, f"resources.{kind.name}", metavar="SIZE", help=kind.help,
            other_names=kind.other_names)
        for kind in AMOUNT_KINDS
    ),
)

# Attributes of several values: encoded, decoded, validated, written and shown by hand.
STRUCTURED: tuple[JobField, ...] = (
    JobField("labels", T.PAIRS, metavar="K=V", flag="label", help="Label; repeatable.",
        update="Set a label; K= removes it."),
    JobField("env", T.PAIRS, "environment", metavar="K[=V]",
        help="Environment variable; K alone copies yours; repeatable.", other_names=("environment",)),
    JobField("env_file", T.TEXTS, "environment", metavar="FILE",
        help="File of KEY=VALUE lines (dotenv); --env wins over it; repeatable."),
    JobField("secrets", T.TEXTS, metavar="NAME[=VAR|:PATH]", flag="secret",
        help="Secret of the tenant: as the variable NAME or VAR, or the file PATH in $COTENANT_SECRETS; repeatable."),
    JobField("mounts", T.TEXTS, "container.mounts", metavar="HOST[:DIR][:ro]", flag="mount",
        help="File or directory of the nodes that the container of an image sees, at DIR; ro: read-only; repeatable.",
        other_names=("mount", "volumes", "volume", "container_mounts")),
    JobField("env_from", T.ENVIRONMENT, "python_environment", metavar="auto|venv|conda|uv|none",
        help="Python environment of this shell that the job gets; auto: the one that is found, where a node has this "
        "folder."),
    JobField("array", T.INDICES, metavar="INDICES",
        help="One job per index: 0-99, 1,3,5-9, or 0-99%10 for 10 at a time."),
    JobField("after", T.JOBS, "dependencies", metavar="ID,…",
        help="Start after these jobs or arrays have ended, or any:ID, ok:ID, fail:ID, started:ID; ids, or names."),
    JobField("after_ok", T.JOBS, "dependencies", metavar="ID,…",
        help="Start after these have succeeded; cancel the job if one has not.",
        other_names=("dependencies", "depends_on", "needs")),
    JobField("notify", T.TEXTS, metavar="TARGET",
        help="Notify https://… or mailto:ADDRESS when the job ends; repeatable."),
    JobField("notify_on", T.TRIGGERS, metavar="EVENT,…",
        help="When to notify: succeeded, failed, cancelled, started; default: the first three."),
    JobField("command", T.COMMAND, help="A list runs as is; a text is run by `sh -c`.", other_names=("args",)),
)
