"""The fields of a job as keyword arguments, read by the reader of job files: one table, one set of rules and errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Literal, Protocol, TypedDict

from cotenant.cli.jobs.job_fields import FORMS, OF_REQUEST
from cotenant.cli.jobs.job_file import Draft, read_options
from cotenant.cli.jobs.submit_directory import current_directory
from cotenant.cli.source_positions import ListNode, MapNode, Node, ScalarNode, SourcePosition
from cotenant.core.model.job_fields import FieldType

Number = int | float
Duration = str | int | float | timedelta  # a number is in seconds
Size = str | int  # a number is in bytes


class HasJobId(Protocol):
    """A job or an array."""

    @property
    def id(self) -> str:
        """Its id."""


Jobs = str | HasJobId | Sequence[str | HasJobId]


class Goal(TypedDict, total=False):
    """The loss at which training is done."""

    loss: Number
    fall: Number
    steps: int


class Objectives(TypedDict, total=False):
    """The objectives of a job or a service."""

    rate: Number
    latency: Duration
    percentile: Number
    arrivals: Number


class SpreadOver(TypedDict, total=False):
    """What the replicas are spread over."""

    by: Literal["node", "rack"]
    min: int


class Progress(TypedDict, total=False):
    """How the progress is read from the output."""

    regex: str


class Requests(TypedDict, total=False):
    """What each replica needs."""

    gpus: str | Number
    gpu_type: str
    cpus: int | Literal["auto"]
    memory: Size
    scratch: Size


class RoleFields(Requests, total=False):
    """One of several roles of a job."""

    name: str
    replicas: int | str
    replicas_min: int
    replicas_max: int
    command: str | Sequence[str]


class JobFields(Requests, total=False):
    """The fields of a job, as in job files: docs/job-fields.md."""

    name: str
    kind: Literal["training", "inference", "cpu"]
    tenant: str
    queue: str
    priority: int | str
    model: str
    steps: int
    expected: Duration
    deadline: Duration | datetime
    begin: Duration | datetime
    hold: bool
    time_limit: Duration
    grace: Duration
    signal: str
    retries: int
    preemptible: bool
    locality: Literal["server", "rack", "anywhere"]
    spread: SpreadOver
    profile: Literal["auto", "never"]
    best_effort: bool
    stop_after_disconnected: Duration
    resize: Literal["restart", "in-place"]
    scale: Literal["strong", "weak"]
    pre_run: Duration
    pids: int
    progress: Progress
    goal: Goal
    qos: Objectives
    objective_check: Literal["require", "warn", "ignore"]
    workdir: str | PurePath
    upload: str | PurePath
    image: str
    mounts: str | Sequence[str]
    role: str
    replicas: int | str
    replicas_min: int
    replicas_max: int
    roles: Sequence[RoleFields]
    labels: Mapping[str, str]
    env: Mapping[str, str]
    env_file: str | PurePath | Sequence[str | PurePath]
    env_from: Literal["auto", "venv", "conda", "uv", "none"]
    after: Jobs
    after_ok: Jobs
    secrets: str | Sequence[str]
    notify: str | Sequence[str]
    notify_on: str | Sequence[str]


def draft_of(
    command: str | PurePath | Sequence[str | PurePath],
    fields: Mapping[str, Any],
    *,
    array: str | Iterable[int] | None = None,
    empty_workdir: bool = False,
) -> Draft:
    """Return the job of keyword arguments; without `workdir` it starts in the current folder, as with `submit`.

    Raises:
        BadJobs: names every invalid field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if array is not None:
        given["array"] = array if isinstance(array, str) else indices_text(array)
    given["command"] = [command] if isinstance(command, PurePath) else command
    place = SourcePosition("the job")
    entries = tuple(
        (ScalarNode(SourcePosition(name), name), _node(SourcePosition(name), value, _type_of(name)))
        for name, value in given.items()
    )
    draft = read_options(MapNode(place, entries), time.time())
    return draft.submitted_from(None if empty_workdir else current_directory(os.environ), os.environ)


def indices_text(indices: Iterable[int]) -> str:
    """Return indices as a job file has them.

    >>> indices_text(range(10)), indices_text(range(0, 9, 4)), indices_text([7, 1])
    ('0-9', '0-8:4', '7,1')
    """
    if isinstance(indices, range) and len(indices) > 1 and indices.step > 0:
        step = f":{indices.step}" if indices.step != 1 else ""
        return f"{indices[0]}-{indices[-1]}{step}"
    return ",".join(str(int(index)) for index in indices)


def _type_of(name: str) -> FieldType | None:
    field = OF_REQUEST.get(name)
    return field.type if field else None


def _node(place: SourcePosition, value: object, kind: FieldType | None = None) -> Node:
    """Return a value as a node of a job file; each scalar as the text that its field reads."""
    match value:
        case Mapping():
            return MapNode(
                place,
                tuple(
                    (ScalarNode(place, str(key)), _node(place, one, _type_of(str(key)))) for key, one in value.items()
                ),
            )
        case list() | tuple():
            return ListNode(place, tuple(_node(place, one) for one in value))
        case _:
            return ScalarNode(place, _text(value, kind), null=value is None)


def _text(value: object, kind: FieldType | None) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(FORMS[kind].write(value)) if kind is FieldType.SIZE and value >= 0 else str(value)
        case float():
            return f"{Decimal(str(value)):f}"
        case timedelta():
            return f"{Decimal(str(value.total_seconds())):f}"
        case datetime():
            return value.isoformat()
        case str() | PurePath():
            return str(value)
        case None:
            return ""
    identity = getattr(value, "id", None)
    return identity if isinstance(identity, str) else str(value)
