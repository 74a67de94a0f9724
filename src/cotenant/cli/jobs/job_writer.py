"""Writing jobs as job files that parse to the same jobs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import yaml

from cotenant.cli import units
from cotenant.cli.jobs.job_fields import AFTER
from cotenant.cli.jobs.job_file import SHELL
from cotenant.core.model.dependencies import Condition
from cotenant.core.model.job import JobSpec, OpenReplicas, Qos, Role
from cotenant.core.model.loss_goal import LossGoal

DEFAULT, DEFAULT_ROLE = JobSpec(), Role()
WIDTH = 100


def write_jobs(specs: Iterable[JobSpec]) -> str:
    """Return job files separated by `---`; default values are omitted.

    >>> from cotenant.core.model.job import Request
    >>> print(write_jobs([JobSpec(name="a", roles=(Role(request=Request(gpu_milli=500)),), command=("true",))]), end="")
    name: a
    kind: training
    gpus: 0.5
    command: ['true']
    """
    documents = [_document(spec) for spec in specs]
    return yaml.dump_all(
        documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH, default_flow_style=None
    )


class _Dumper(yaml.SafeDumper):
    """Writes maps in block style, lists of words in flow style, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return true: write repeated values in full."""
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        """Write each field on its own line."""
        return super().represent_mapping(tag, mapping, flow_style=False)

    def represent_text(self, data: str) -> Any:
        """Escape unprintable characters, such as Unicode line breaks and control characters."""
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def represent_script(self, data: str) -> Any:
        """Write a script as a literal block."""
        plain = all(line.isprintable() for line in data.split("\n"))
        return self.represent_scalar("tag:yaml.org,2002:str", data, "|" if plain else '"')


class _Script(str):
    """A shell command."""


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(_Script, _Dumper.represent_script)


def _document(spec: JobSpec) -> dict[str, Any]:
    single = len(spec.roles) == 1 and not spec.roles[0].command
    fields: dict[str, Any] = {
        "name": spec.name,
        "kind": spec.kind.value,
        "tenant": _unless(spec.tenant, DEFAULT.tenant),
        "queue": _unless(spec.queue, DEFAULT.queue),
        "priority": spec.priority,
        "model": spec.model,
        "steps": spec.steps_total,
        "expected": _seconds(spec.expected_seconds),
        "deadline": None if spec.deadline_seconds is None else _time(spec.deadline_seconds),
        "grace": _unless(units.write_seconds(spec.grace_seconds), units.write_seconds(DEFAULT.grace_seconds)),
        "signal": _unless(spec.warning_signal, DEFAULT.warning_signal),
        "retries": spec.retries_max,
        "preemptible": None if spec.preemptible else False,
        "locality": spec.locality.value if spec.locality else None,
        "profile": None if spec.profiled else "never",
        "best_effort": True if spec.best_effort else None,
        "stop_after_disconnected": _seconds(spec.stop_after_disconnected_seconds),
        "pre_run": _seconds(spec.pre_run_seconds),
        "pids": spec.pids_max,
        "progress": {"regex": spec.progress_regex} if spec.progress_regex else None,
        "goal": _goal(spec.loss_goal),
        "qos": _qos(spec.qos),
        "labels": dict(spec.labels),
        "env": dict(spec.environment),
        "workdir": spec.working_directory,
        "array": str(spec.array) if spec.array else None,
        **{name: _after(spec, condition) for name, condition in AFTER.items()},
    }
    if single:
        fields |= {f"{'role' if name == 'name' else name}": value for name, value in _role(spec.roles[0]).items()}
    fields["command"] = _command(spec.command)
    if not single:
        fields["roles"] = [_given(_role(role) | {"command": _command(role.command)}) for role in spec.roles]
    return _given(fields)


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else units.write_seconds(seconds)


def _after(spec: JobSpec, condition: Condition) -> list[str]:
    return [one.job_id for one in spec.dependencies if one.condition is condition]


def _command(words: tuple[str, ...]) -> _Script | list[str]:
    return _Script(words[2]) if len(words) == 3 and words[:2] == SHELL else list(words)


def _role(role: Role) -> dict[str, Any]:
    request = role.request
    return {
        "name": _unless(role.name, DEFAULT_ROLE.name),
        **_replicas(role),
        "gpus": _number(units.write_gpus(request.gpu_milli)) if request.gpu_milli else None,
        "gpu_type": request.gpu_type,
        "cpus": request.cores,
        "memory": units.write_bytes(request.memory_bytes) if request.memory_bytes else None,
    }


def _replicas(role: Role) -> dict[str, Any]:
    if role.open is None:
        return {"replicas": _unless(role.replicas, DEFAULT_ROLE.replicas)}
    default = OpenReplicas()
    return {
        "replicas": units.AUTO,
        "replicas_min": _unless(role.open.least, default.least),
        "replicas_max": _unless(role.open.most, default.most),
    }


def _goal(goal: LossGoal) -> dict[str, Any]:
    target = {} if goal.target is None else {"loss": _number(repr(goal.target))}
    return target | _given({"fall": _plain(goal.fall_min), "steps": goal.fall_steps})


def _qos(qos: Qos) -> dict[str, Any]:
    return _given(
        {
            "rate": _plain(qos.rate_min_per_second),
            "latency": units.write_seconds(qos.latency_seconds) if qos.latency_seconds else None,
            "percentile": _plain(qos.latency_percentile),
            "arrivals": _plain(qos.arrivals_per_second),
        }
    )


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without empty values."""
    return {
        name: value
        for name, value in fields.items()
        if value is False or isinstance(value, _Script) or value not in (None, "", 0, [], {})
    }


def _unless(value: Any, default: Any) -> Any:
    return None if value == default else value


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _number(text: str) -> float | int:
    return _plain(float(text))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
