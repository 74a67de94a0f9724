"""The fields of a job file, from the table of job fields: how each type is read, written and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from cotenant.cli import units
from cotenant.core.model.dependencies import Condition
from cotenant.core.model.job import (
    BatchScaling,
    EnvironmentChoice,
    JobKind,
    Locality,
    ObjectiveCheck,
    ResizeMode,
    SpreadBy,
)
from cotenant.core.model.job_array import read_array
from cotenant.core.model.job_fields import JOB, REQUEST, ROLE, STRUCTURED, FieldType, JobField
from cotenant.core.model.notification import Trigger
from cotenant.core.model.priority import in_words, parse_priority
from cotenant.core.model.validation import shown

Fields = Mapping[str, JobField]  # by their names at one place of a job file


def _signal(text: str) -> str:
    name = text.strip().upper()
    return name if name.startswith("SIG") else f"SIG{name}"


def _choice(choices: type[StrEnum]) -> Callable[[str], Any]:
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


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value


@dataclass(frozen=True, slots=True)
class TextForm:
    """How values of a type are read from a text, written to a job file, and shown."""

    read: Callable[[str], Any] = str
    write: Callable[[Any], Any] = lambda value: value
    show: Callable[[Any], str] = str


FORMS: Mapping[FieldType, TextForm] = {
    FieldType.TEXT: TextForm(),
    FieldType.SIGNAL: TextForm(_signal),
    FieldType.INTEGER: TextForm(units.parse_integer),
    FieldType.NUMBER: TextForm(units.parse_number, _plain, "{:g}".format),
    FieldType.BOOLEAN: TextForm(units.parse_bool, show=lambda value: "yes" if value else "no"),
    FieldType.DURATION: TextForm(units.parse_seconds, units.write_seconds, units.write_seconds),
    FieldType.SIZE: TextForm(units.parse_bytes, units.write_bytes, units.write_bytes),
    FieldType.GPUS: TextForm(units.parse_gpu_milli, lambda milli: _plain(float(units.write_gpus(milli)))),
    FieldType.CORES: TextForm(units.parse_cores),
    FieldType.REPLICAS: TextForm(units.parse_replicas),
    FieldType.KIND: TextForm(_choice(JobKind), str),
    FieldType.LOCALITY: TextForm(_choice(Locality), str),
    FieldType.SPREAD_BY: TextForm(_choice(SpreadBy), str),
    FieldType.OBJECTIVE_CHECK: TextForm(_choice(ObjectiveCheck), str),
    FieldType.RESIZE_MODE: TextForm(_choice(ResizeMode), str),
    FieldType.BATCH_SCALING: TextForm(_choice(BatchScaling), str),
    FieldType.ENVIRONMENT: TextForm(_choice(EnvironmentChoice), str),
    FieldType.PRIORITY: TextForm(parse_priority, show=in_words),
    FieldType.PROFILE: TextForm(_profiled, lambda profiled: "auto" if profiled else "never"),
    FieldType.INDICES: TextForm(read_array),
    FieldType.TRIGGERS: TextForm(_choice(Trigger), str),  # each of them
    FieldType.TIME: TextForm(
        write=lambda unix: datetime.fromtimestamp(unix, UTC).isoformat(),
        show=lambda unix: units.format_time(unix) if units.has_date(unix) else "",
    ),
}


def read(field: JobField, text: str, now: float) -> Any:
    """Return the value that a text gives to a field.

    Raises:
        ValueError: the text is not of the field's type.
    """
    return units.parse_time(text, now) if field.type is FieldType.TIME else FORMS[field.type].read(text)


def write(field: JobField, value: Any) -> Any:
    """Return a value as a job file has it."""
    return value if value is None else FORMS[field.type].write(value)


def _inside(name: str) -> Fields:
    return {field.key.removeprefix(f"{name}."): field for field in JOB if field.key.startswith(f"{name}.")}


ALL_FIELDS = (*JOB, *ROLE, *REQUEST, *STRUCTURED)
PLAIN: Fields = {field.key: field for field in JOB if "." not in field.key}
GROUPS: Mapping[str, Fields] = {  # the fields inside `qos` and the like
    name: _inside(name) for name in dict.fromkeys(field.key.partition(".")[0] for field in JOB if "." in field.key)
}
OF_REQUEST: Fields = {field.key: field for field in REQUEST}
SINGLE_ROLE: Fields = {field.key: field for field in ROLE}  # of a job with a single role
LISTED_ROLE: Fields = {"name" if key == "role" else key: field for key, field in SINGLE_ROLE.items()}
OF_SEVERAL: Fields = {field.key: field for field in STRUCTURED}
AFTER = {"after": Condition.AFTER, "after_ok": Condition.AFTER_OK}  # what a word without a condition means
AFTER_CONDITIONS = {  # before the colon, in `after`
    "any": Condition.AFTER,
    "ok": Condition.AFTER_OK,
    "fail": Condition.AFTER_FAIL,
    "started": Condition.AFTER_STARTED,
}
JOB_FIELDS = (*PLAIN, *GROUPS, *SINGLE_ROLE, *OF_REQUEST, *OF_SEVERAL, "roles")
ROLE_FIELDS = (*LISTED_ROLE, *OF_REQUEST, "command")
OTHER_NAMES = {name: field.key for field in ALL_FIELDS for name in field.other_names}
