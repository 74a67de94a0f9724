"""Everything that is derived from the table of job fields follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.conftest import Shell

from cotenant.cli.jobs import submit, update
from cotenant.cli.jobs.job_fields import ALL_FIELDS, FORMS, GROUPS, read
from cotenant.cli.jobs.job_options import NOT_PREEMPTIBLE
from cotenant.cli.jobs.job_writer import write_jobs
from cotenant.cli.jobs.show import field_lines
from cotenant.cli.source_positions import MapNode, ScalarNode, compose
from cotenant.codec.specs import spec_from_wire, spec_to_wire
from cotenant.core.model.job import BatchScaling, JobKind, JobSpec, Locality, ObjectiveCheck, ResizeMode, SpreadBy
from cotenant.core.model.job_fields import JOB, FieldType, JobField, attributes
from cotenant.core.model.validation import check_spec
from cotenant.v1 import job_pb2

NOW = 1_800_000_000.0
BY_HAND = {  # of several values; on the wire and in the model
    "roles", "command", "environment", "labels", "dependencies", "array", "array_task", "submit_directory",
    "notify", "notify_on", "python_environment", "secrets",
}  # fmt: skip
NOT_SHOWN_ALONE = {"kind", "tenant", "queue", "locality"}  # in lines with other fields, or of a newer server
LIMITED = [field for field in JOB if field.limit]
milliseconds = st.integers(0, 10**8).map(lambda count: count / 1000)
VALUES: Mapping[FieldType, st.SearchStrategy[Any]] = {
    FieldType.TEXT: st.sampled_from(["", "vision", "/srv/a b", r"step (\d+)", "- 'x': \"y\"", "010", "yes", "~"])
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    FieldType.SIGNAL: st.sampled_from(["SIGTERM", "SIGUSR1", "SIGINT"]),
    FieldType.INTEGER: st.integers(-5, 2**31 - 1) | st.integers(-5, 100),
    FieldType.NUMBER: st.floats(-1e6, 1e6) | st.floats(0, 99),
    FieldType.BOOLEAN: st.booleans(),
    FieldType.DURATION: milliseconds,
    FieldType.TIME: st.integers(int(NOW), 2**32).map(float),
    FieldType.KIND: st.sampled_from(JobKind),
    FieldType.LOCALITY: st.none() | st.sampled_from(Locality),
    FieldType.SPREAD_BY: st.none() | st.sampled_from(SpreadBy),
    FieldType.OBJECTIVE_CHECK: st.none() | st.sampled_from(ObjectiveCheck),
    FieldType.RESIZE_MODE: st.none() | st.sampled_from(ResizeMode),
    FieldType.BATCH_SCALING: st.none() | st.sampled_from(BatchScaling),
    FieldType.PRIORITY: st.integers(-2_000_000, 2_000_000),
    FieldType.PROFILE: st.booleans(),
}


def values(field: JobField) -> st.SearchStrategy[Any]:
    """Generate valid values of a field."""
    return VALUES[field.type].filter(lambda value: value is None or not field.limit or not field.limit.reason(value))


def job_of(field: JobField, value: Any) -> JobSpec:
    return JobSpec(**attributes({field.attribute: value}))


def of_table(field: JobField) -> str:
    return field.key


def test_every_field_of_the_wire_and_of_the_model_is_in_the_table_or_by_hand() -> None:
    wire = {field.wire for field in JOB}
    for descriptor in job_pb2.JobSpec.DESCRIPTOR.fields:
        nested = {path for path in wire if path.startswith(f"{descriptor.name}.")}
        if nested:
            inner = descriptor.message_type
            assert inner
            paths = {f"{descriptor.name}.{one.name}" for one in inner.fields}
            assert nested == paths - {"container.mounts"}
        else:
            assert (descriptor.name in wire) != (descriptor.name in BY_HAND), descriptor.name
    assert {one.name for one in fields(JobSpec)} == {field.attribute.partition(".")[0] for field in JOB} | BY_HAND
    for name in ("qos", "loss_goal"):
        inside = {one.name for one in fields(getattr(JobSpec(), name))}
        assert inside == {field.attribute.partition(".")[2] for field in JOB if field.attribute.startswith(f"{name}.")}


def test_names_are_unique() -> None:
    keys = [field.key for field in ALL_FIELDS]
    flags = [field.flag for field in ALL_FIELDS if field.metavar]
    assert len(set(keys)) == len(keys)
    assert len(set(flags)) == len(flags)
    assert not {name for field in ALL_FIELDS for name in field.other_names} & set(keys)


@pytest.mark.parametrize("field", JOB, ids=of_table)
@given(data=st.data())
def test_each_field_comes_back_from_the_wire(field: JobField, data: st.DataObject) -> None:
    value = data.draw(values(field))
    message = job_pb2.JobSpec.FromString(spec_to_wire(job_of(field, value)).SerializeToString())
    assert field.value_of(spec_from_wire(message)) == value


@pytest.mark.parametrize("field", JOB, ids=of_table)
def test_each_field_has_its_default_if_the_wire_has_none(field: JobField) -> None:
    assert field.key == "kind" or field.value_of(spec_from_wire(job_pb2.JobSpec())) == field.default


@pytest.mark.parametrize("field", JOB, ids=of_table)
@given(data=st.data())
def test_each_field_is_read_from_job_files_as_it_is_written(field: JobField, data: st.DataObject) -> None:
    value = data.draw(values(field))
    text = written(job_of(field, value), field.key)
    if text is None:
        assert value in (field.default, 0)  # 0: shorter than a millisecond
    else:
        assert read(field, text, NOW) == value
        assert value != field.default or field.key == "kind"


def written(spec: JobSpec, key: str) -> str | None:
    """Return the text of a field in the job file of a spec."""
    [node] = compose(write_jobs([spec]), "job.yaml")
    for name in key.split("."):
        assert isinstance(node, MapNode)
        found = {text.text: inner for text, inner in node.entries}
        if name not in found:
            return None
        node = found[name]
    assert isinstance(node, ScalarNode)
    return node.text


@pytest.mark.parametrize("field", LIMITED, ids=of_table)
@given(data=st.data())
def test_a_value_beyond_its_limit_is_a_violation_of_its_field(field: JobField, data: st.DataObject) -> None:
    assert field.limit
    value = data.draw(VALUES[field.type])
    found = {one.description for one in check_spec(job_of(field, value)) if one.field == f"spec.{field.wire}"}
    wrong = field.limit.reason(value)
    assert (wrong in found) == bool(wrong)


def options_of(command: Any, name: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the metavar and the help of each option of a command."""
    app = typer.Typer()
    command.register(app)
    app.command("other")(lambda: None)
    parameters = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]  # of a group
    return {flag: (one.metavar, one.help) for one in parameters for flag in one.opts if hasattr(one, "help")}


def test_the_options_of_submit_are_those_of_the_table() -> None:
    options = options_of(submit, "submit")
    for field in ALL_FIELDS:
        if field.metavar:
            assert options.pop(f"--{field.flag}") == (field.metavar, field.help)
        if field.switch:
            assert options.pop(f"--{field.flag}") == (None, field.help)
    assert f"--{NOT_PREEMPTIBLE.flag}" in options
    assert not options.keys() & {f"--{field.flag}" for field in ALL_FIELDS}


def test_the_options_of_update_are_those_of_the_table() -> None:
    options = options_of(update, "update")
    assert {flag: help for flag, (_, help) in options.items() if flag[:2] == "--" and flag != "--json"} == {
        f"--{field.flag}": field.update for field in ALL_FIELDS if field.update
    }


def test_an_option_names_itself_in_an_error(shell: Shell) -> None:
    for field in JOB:
        bad = {FieldType.TEXT: "", FieldType.SIGNAL: "KILL"}.get(field.type, "no such value")
        if bad and field.metavar:
            ended = shell("submit", f"--{field.flag}", bad, "--dry-run", "--", "true")
            assert (ended.code, f"--{field.flag}: must be" in ended.err) == (2, True), ended.err


@pytest.mark.parametrize("field", [field for field in JOB if field.shown], ids=of_table)
@given(data=st.data())
def test_each_field_with_a_label_is_shown_unless_it_has_its_default(field: JobField, data: st.DataObject) -> None:
    value = data.draw(values(field))
    lines = field_lines(spec_to_wire(job_of(field, value)))
    assert lines == (
        {} if value == field.default else {field.shown: field.shown_as.format(FORMS[field.type].show(value))}
    )


def test_the_groups_of_job_files_are_those_of_the_table() -> None:
    assert {f"{name}.{key}" for name, group in GROUPS.items() for key in group} == {
        field.key for field in JOB if "." in field.key
    }
