"""Writing jobs as job files that parse to the same jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from cotenant.cli import units
from cotenant.cli.jobs.job_fields import AFTER, AFTER_CONDITIONS, LISTED_ROLE, OF_REQUEST, SINGLE_ROLE, Fields, write
from cotenant.cli.jobs.job_file import SHELL
from cotenant.core.model.dependencies import Condition
from cotenant.core.model.job import JobSpec, OpenReplicas, Role
from cotenant.core.model.job_fields import JOB
from cotenant.deferred import yaml

WIDTH = 100
ALWAYS = "kind"  # its default depends on the roles
LAST = (
    "labels",
    "env",
    "secrets",
    "mounts",
    "workdir",
    "notify",
    "notify_on",
    "array",
    *AFTER,
    *SINGLE_ROLE,
    *OF_REQUEST,
    "command",
    "roles",
)


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
    fields: dict[str, Any] = {}
    for field in JOB:
        if (value := write(field, field.value_of(spec))) != write(field, field.default) or field.key == ALWAYS:
            outer, _, inner = field.key.partition(".")
            target = fields.setdefault(outer, {}) if inner else fields
            target[inner or outer] = value
    fields |= _given(
        {
            "labels": dict(spec.labels),
            "env": dict(spec.environment),
            "secrets": list(map(str, spec.secrets)),
            "mounts": list(map(str, spec.container.mounts)),
            "notify": list(spec.notify),
            "notify_on": list(map(str, spec.notify_on)),
            "array": str(spec.array) if spec.array else None,
            **{name: _after(spec, name) for name in AFTER},
            "command": _command(spec.command),
        }
    )
    if len(spec.roles) == 1 and not spec.roles[0].command:
        fields |= _role(spec.roles[0], SINGLE_ROLE)
    else:
        roles = [_role(role, LISTED_ROLE) | _given({"command": _command(role.command)}) for role in spec.roles]
        fields |= _given({"roles": roles})
    return dict(sorted(fields.items(), key=lambda field: LAST.index(field[0]) if field[0] in LAST else -1))


def _after(spec: JobSpec, name: str) -> list[str]:
    """Return the words of `after` or `after_ok`: `after` has all dependencies that need a condition of their own."""
    words = {condition: word for word, condition in AFTER_CONDITIONS.items()}
    named = [one for one in spec.dependencies if (one.condition is Condition.AFTER_OK) is (name == "after_ok")]
    return [
        f"{words[one.condition]}:{one.job_id}"
        if one.condition not in AFTER.values() or (name == "after" and ":" in one.job_id)
        else one.job_id
        for one in named
    ]


def _command(words: tuple[str, ...]) -> _Script | list[str]:
    return _Script(words[2]) if len(words) == 3 and words[:2] == SHELL else list(words)


def _role(role: Role, names: Fields) -> dict[str, Any]:
    """Return the fields in which a role differs from the default one."""
    values, defaults = _role_values(role), _role_values(Role())
    return {
        name: write(field, values[field.attribute])
        for name, field in {**names, **OF_REQUEST}.items()
        if values[field.attribute] != defaults[field.attribute]
    }


def _role_values(role: Role) -> dict[str, Any]:
    replicas = units.AUTO if role.open else str(role.elastic or "") or role.replicas
    return {"name": role.name, "replicas": replicas, **asdict(role.open or OpenReplicas()), **asdict(role.request)}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without empty values."""
    return {name: value for name, value in fields.items() if value or isinstance(value, _Script)}
