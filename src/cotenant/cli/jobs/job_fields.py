"""The fields of a job file: the attribute each sets, its path on the wire, and its parser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cotenant.cli import units
from cotenant.core.model.dependencies import Condition
from cotenant.core.model.job import JobKind, Locality
from cotenant.core.model.job_array import read_array
from cotenant.core.model.priority import parse_priority
from cotenant.core.model.validation import shown


def _signal(text: str) -> str:
    name = text.strip().upper()
    return name if name.startswith("SIG") else f"SIG{name}"


def _choice(choices: type[JobKind] | type[Locality]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return choices(text.strip().lower())
        except ValueError:
            raise ValueError(f"must be one of {', '.join(choices)}, not {shown(text)}") from None

    return read


def _profiled(text: str) -> bool:
    choices = {"auto": True, "never": False}
    if text.strip().lower() not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}, not {shown(text)}")
    return choices[text.strip().lower()]


@dataclass(frozen=True, slots=True)
class Field:
    """A scalar field: the attribute it sets, its path on the wire, and its parser."""

    attribute: str
    wire: str
    read: Callable[[str], Any] = str


JOB = {
    "name": Field("name", "name"),
    "kind": Field("kind", "kind", _choice(JobKind)),
    "tenant": Field("tenant", "tenant"),
    "queue": Field("queue", "queue"),
    "priority": Field("priority", "priority", parse_priority),
    "model": Field("model", "model"),
    "steps": Field("steps_total", "steps_total", units.parse_integer),
    "expected": Field("expected_seconds", "expected_duration", units.parse_seconds),
    "grace": Field("grace_seconds", "grace", units.parse_seconds),
    "signal": Field("warning_signal", "warning_signal", _signal),
    "retries": Field("retries_max", "retries_max", units.parse_integer),
    "preemptible": Field("preemptible", "preemptible", units.parse_bool),
    "locality": Field("locality", "locality", _choice(Locality)),
    "profile": Field("profiled", "profiled", _profiled),
    "best_effort": Field("best_effort", "best_effort", units.parse_bool),
    "stop_after_disconnected": Field("stop_after_disconnected_seconds", "stop_after_disconnected", units.parse_seconds),
    "pre_run": Field("pre_run_seconds", "pre_run", units.parse_seconds),
    "pids": Field("pids_max", "pids_max", units.parse_integer),
    "workdir": Field("working_directory", "working_directory"),
    "array": Field("array", "array", read_array),
}
REQUEST = {
    "gpus": Field("gpu_milli", "resources.gpu_milli", units.parse_gpu_milli),
    "cpus": Field("cores", "resources.cores", units.parse_cores),
    "memory": Field("memory_bytes", "resources.memory_bytes", units.parse_bytes),
    "gpu_type": Field("gpu_type", "resources.gpu_type"),
}
REPLICAS = {
    "replicas": Field("replicas", "replicas", units.parse_replicas),
    "replicas_min": Field("least", "open.min", units.parse_integer),
    "replicas_max": Field("most", "open.max", units.parse_integer),
}
SINGLE_ROLE = {"role": Field("name", "name"), **REPLICAS}  # of a job with a single role
ROLE = {"name": Field("name", "name"), **REPLICAS}
QOS = {
    "rate": Field("rate_min_per_second", "qos.rate_min_per_second", units.parse_number),
    "latency": Field("latency_seconds", "qos.latency_seconds", units.parse_seconds),
    "percentile": Field("latency_percentile", "qos.latency_percentile", units.parse_number),
    "arrivals": Field("arrivals_per_second", "qos.arrivals_per_second", units.parse_number),
}
GOAL = {
    "loss": Field("target", "loss_goal.target", units.parse_number),
    "fall": Field("fall_min", "loss_goal.fall_min", units.parse_number),
    "steps": Field("fall_steps", "loss_goal.fall_steps", units.parse_integer),
}
PROGRESS = {"regex": Field("progress_regex", "progress.regex")}
AFTER = {"after": Condition.AFTER, "after_ok": Condition.AFTER_OK}
NESTED = (*AFTER, "command", "deadline", "env", "goal", "labels", "progress", "qos", "roles")
JOB_FIELDS = (*JOB, *SINGLE_ROLE, *REQUEST, *NESTED)
ROLE_FIELDS = (*ROLE, *REQUEST, "command")
OTHER_NAMES = {  # names on the wire or in other schedulers
    "environment": "env",
    "min_replicas": "replicas_min",
    "max_replicas": "replicas_max",
    "working_directory": "workdir",
    "cores": "cpus",
    "cpu": "cpus",
    "mem": "memory",
    "gpu_milli": "gpus",
    "steps_total": "steps",
    "retries_max": "retries",
    "expected_duration": "expected",
    "warning_signal": "signal",
    "profiled": "profile",
    "args": "command",
    "pids_max": "pids",
    "stop_on_disconnect": "stop_after_disconnected",
    "dependencies": "after_ok",
    "depends_on": "after_ok",
    "needs": "after_ok",
}
