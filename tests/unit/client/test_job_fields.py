"""Keyword arguments of the Python API: typed, complete, and read like job files."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cotenant.cli.jobs.job_fields import GROUPS, JOB_FIELDS, ROLE_FIELDS
from cotenant.cli.jobs.job_file import BadJobs
from cotenant.client import job_fields
from cotenant.client.errors import InvalidArgument, as_api_errors
from cotenant.client.job_fields import draft_of, indices_text
from cotenant.core.model.job import JobSpec


def spec_of(**fields: Any) -> JobSpec:
    return draft_of(["true"], fields).spec


def test_every_field_of_a_job_file_is_typed() -> None:
    assert {*job_fields.JobFields.__annotations__, "command", "array"} == set(JOB_FIELDS)
    assert set(job_fields.RoleFields.__annotations__) == set(ROLE_FIELDS)
    groups = {
        "spread": job_fields.SpreadOver,
        "progress": job_fields.Progress,
        "goal": job_fields.Goal,
        "qos": job_fields.Objectives,
    }
    assert {name: set(kind.__annotations__) for name, kind in groups.items()} == {
        name: set(fields) for name, fields in GROUPS.items()
    }


def test_plain_python_values_are_read() -> None:
    spec = spec_of(
        gpus=0.5,
        cpus="auto",
        memory=3 * 2**30,
        time_limit=timedelta(hours=1),
        grace=0.00001,
        deadline=datetime(2030, 1, 1, tzinfo=UTC),
        preemptible=False,
        env={"A": "1"},
        workdir=Path("/data"),
        qos={"rate": 2.5},
        name=None,
    )
    request = spec.roles[0].request
    assert (request.gpu_milli, request.cores, request.memory_bytes) == (500, None, 3 * 2**30)
    assert (spec.time_limit_seconds, spec.grace_seconds, spec.deadline_seconds) == (3600.0, 0.00001, 1893456000.0)
    assert (spec.preemptible, dict(spec.environment), spec.working_directory) == (False, {"A": "1"}, "/data")
    assert spec.qos.rate_min_per_second == 2.5


def test_roles_and_dependencies_are_read() -> None:
    class Finished:
        id = "a1"

    spec = spec_of(roles=[{"name": "ps", "cpus": 2}, {"name": "worker", "gpus": 1, "replicas": 2}], after=[Finished()])
    assert [(role.name, role.replicas, role.request.gpu_milli) for role in spec.roles] == [
        ("ps", 1, 0),
        ("worker", 2, 1000),
    ]
    assert [one.job_id for one in spec.dependencies] == ["a1"]


def test_a_command_is_words_or_a_shell_script() -> None:
    assert draft_of(["echo", "a b"], {}).spec.command == ("echo", "a b")
    assert draft_of("echo a | wc", {}).spec.command == ("sh", "-c", "echo a | wc")
    assert draft_of(Path("/bin/true"), {}).spec.command == ("/bin/true",)


def test_a_job_starts_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PWD", raising=False)
    folder = draft_of(["true"], {}).spec.submit_directory
    assert folder is not None
    assert folder.path == str(tmp_path)
    assert draft_of(["true"], {}, empty_workdir=True).spec.submit_directory is None


def test_the_error_names_every_bad_field() -> None:
    with pytest.raises(InvalidArgument) as caught, as_api_errors():
        draft_of(["true"], {"gpuz": 1, "gpus": "many", "memory": "1", "qos": {"rate": -1}})
    found = {one.field: one.description for one in caught.value.fields}
    assert set(found) == {"gpuz", "gpus", "memory", "qos.rate"}
    assert "did you mean gpus?" in found["gpuz"]
    assert all(f"{field}: " in str(caught.value) for field in found)


def test_indices() -> None:
    assert draft_of(["true"], {}, array=range(0, 10, 3)).spec.array == draft_of(["true"], {}, array="0-9:3").spec.array
    assert indices_text([3]) == "3"
    with pytest.raises(BadJobs, match="has a mistake"):
        draft_of(["true"], {}, array=[])
