"""`cotenant update`: change fields of a job that has not finished."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from google.protobuf.field_mask_pb2 import FieldMask

from cotenant.cli.annotations import options, typer
from cotenant.cli.jobs.change import change
from cotenant.cli.jobs.job_fields import ALL_FIELDS, OF_SEVERAL, read
from cotenant.cli.jobs.job_options import in_order, keyword, parameter_name, with_parameters
from cotenant.cli.jobs.list_jobs import split_labels
from cotenant.cli.outcome import usage_error
from cotenant.codec.specs import fields_to_wire
from cotenant.core.model.job_fields import FieldType, JobField
from cotenant.v1.job_pb2 import Job, JobSpec
from cotenant.v1.job_service_pb2 import UpdateJobRequest

NO_TIME = "none"
LABELS = OF_SEVERAL["labels"]
UPDATED = in_order(
    (field for field in ALL_FIELDS if field.update), ("name", "priority", "deadline", "retries", "labels")
)
OPTION_TYPES: Mapping[FieldType, Any] = {  # others are texts
    FieldType.BOOLEAN: bool,
    FieldType.INTEGER: int,
    FieldType.PAIRS: list[str],
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("update")(with_parameters(update, "changes", _parameters(), _changes))


def update(
    context: typer.Context, job_id: options.JobId, changes: Mapping[JobField, Any], *, as_json: options.AsJson = False
) -> None:
    """Change a job that has not finished.

    A running service is not restarted; with `replicas: auto` the new objectives apply from its next start.

    \b
    Examples:
      cotenant update ID --priority high --deadline 2h
      cotenant update ID --label project=vision --not-preemptible
      cotenant update ID --arrivals 900 --latency 50ms
      cotenant update ID --steps 120000
    """
    if not changes:
        raise usage_error("nothing to change", hint="see `cotenant update --help`")
    change(context, [job_id], as_json, lambda mesh, job: mesh.jobs.UpdateJob(_updated(job, changes)))


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the options of `update`."""
    for field in UPDATED:
        kind = OPTION_TYPES.get(field.type, str)
        negated = f"/--not-{field.flag}" if field.type is FieldType.BOOLEAN else ""
        declared = typer.Option(
            f"--{field.flag}{negated}",
            metavar=field.metavar or None,
            help=field.update,
            min=field.limit.least if field.limit and kind is int else None,
            max=field.limit.most if field.limit and kind is int else None,
        )
        yield keyword(field, Annotated[kind | None, declared], None)


def _changes(_context: typer.Context, given: Mapping[str, Any]) -> dict[JobField, Any]:
    """Return the new values of the given options; the deadline is None if it is removed."""
    return {
        field: _value(field, value) if isinstance(value, str) else value
        for field in UPDATED
        if (value := given[parameter_name(field)]) is not None
    }


def _value(field: JobField, text: str) -> Any:
    if field.type is FieldType.TIME and text == NO_TIME:
        return None
    try:
        value = read(field, text, time.time())
    except ValueError as error:
        raise usage_error(f"--{field.flag} {error}") from None
    if isinstance(value, int) and field.limit and (wrong := field.limit.reason(value)):  # the message may not hold it
        raise usage_error(f"--{field.flag} {wrong}")
    return value


def _updated(job: Job, changes: Mapping[JobField, Any]) -> UpdateJobRequest:
    """Return a request that updates only the given fields."""
    request = UpdateJobRequest(
        job=Job(id=job.id), update_mask=FieldMask(paths=[f"spec.{field.wire}" for field in changes])
    )
    values = dict(changes)
    if (pairs := values.pop(LABELS, None)) is not None:
        request.job.spec.labels.update(_merged_labels(job, pairs))
        request.job.etag = job.etag  # labels are replaced as a whole; the etag guards against concurrent changes
    request.job.spec.MergeFrom(JobSpec(**fields_to_wire(values.items())))
    return request


def _merged_labels(job: Job, pairs: Sequence[str]) -> dict[str, str]:
    labels = {**job.spec.labels, **split_labels(pairs)}
    return {key: value for key, value in labels.items() if value}
