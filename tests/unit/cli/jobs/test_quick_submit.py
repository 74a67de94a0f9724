"""A job with plain options is submitted without the model of jobs, as the same message."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli import units
from cotenant.cli.jobs import quick_submit
from cotenant.cli.jobs.job_file import BadJobs, read_options
from cotenant.cli.jobs.job_options import document
from cotenant.cli.jobs.quick_submit import plain_spec
from cotenant.cli.outcome import ExitCode
from cotenant.cli.quick import QuickContext
from cotenant.cli.quick_table import COMMANDS, JOB_FIELDS
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.v1.job_pb2 import JobSpec

DEFAULTS: dict[str, Any] = dict(COMMANDS["submit"]["defaults"])
TEXTS = ("", "a", "auto", "high", "V100|A100", "é", "/data", "x" * 300)
NUMBERS = ("1", "0", "8", "0.5", "-7", " 3 ", "9" * 25, "2h30m", "1.5", "250ms", "0.0001s", "100ms500ms", "4GiB")
VALUES = st.sampled_from((*TEXTS, *NUMBERS))
PAIRS = st.lists(st.sampled_from(["A=b", "A=", "A=c=d", "B=", "HOME", "=x", ""]), max_size=3)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(JOB_FIELDS, VALUES),
        "job_env": PAIRS,
        "job_labels": PAIRS,
        "job_not_preemptible": st.booleans(),
    },
)


def by_submit(values: dict[str, Any]) -> JobSpec:
    """Return the message that `submit` sends."""
    context = QuickContext({}, ["run", "-x"])
    job_values = {name: value for name, value in values.items() if name.startswith("job_")}
    draft = read_options(document(cast("Any", context), job_values), now=0.0)
    return draft.to_wire(draft.spec)


@given(OPTIONS)
def test_the_message_is_that_of_submit(options: dict[str, Any]) -> None:
    values = {**DEFAULTS, **options}
    spec = plain_spec(values, ["run", "-x"])
    if spec is None:
        return
    try:
        expected = by_submit(values)
    except BadJobs:
        return  # the server says so, too, and then `submit` does
    assert spec == expected


@pytest.mark.parametrize("name", sorted(JOB_FIELDS))
def test_every_plain_option_is_sent(name: str) -> None:
    good = {"INTEGER": "3", "DURATION": "90s", "SIZE": "4GiB", "GPUS": "2", "CORES": "3", "PRIORITY": "high"}
    text = "/a" if name == "job_workdir" else "a"
    values = {**DEFAULTS, "job_gpus": "1", name: good.get(JOB_FIELDS[name][1], text)}
    spec = plain_spec(values, ["run", "-x"])
    assert spec is not None
    assert spec == by_submit(values)
    assert spec != plain_spec({**DEFAULTS, "job_gpus": "1"}, ["run", "-x"])


@pytest.mark.parametrize(
    "values",
    [
        {"job_array": "0-9"},
        {"job_after": "a"},
        {"job_deadline": "2h"},
        {"as_json": True},
        {"wait": True},
        {"dry_run": True},
        {"files": ["job.yaml"]},
        {"job_gpus": "x"},
        {"job_env": ["HOME"]},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_submit(values: dict[str, Any]) -> None:
    assert plain_spec({**DEFAULTS, **values}, ["true"]) is None
    assert plain_spec(DEFAULTS, None) is None


def test_an_error_is_explained_by_submit_and_the_job_is_not_created_twice(shell: Shell, standin: Standin) -> None:
    ended = shell("submit", "--gpus", "9", "--", "true")
    assert ended.code == ExitCode.FAILED
    assert ended.err.startswith("error: NEVER_FITS")
    first, second = standin.jobs.asked
    assert first.request_id == second.request_id
    assert first.spec == second.spec


def test_the_folder_and_the_path_of_the_shell_are_sent(shell: Shell, standin: Standin) -> None:
    assert shell("submit", "--", "true").code == ExitCode.DONE
    [request] = standin.jobs.asked
    assert os.path.samefile(request.spec.submit_directory.path, os.getcwd())
    assert request.spec.submit_directory.environment["PATH"] == os.environ["PATH"]
    assert shell("submit", "--empty-workdir", "--", "true").code == ExitCode.DONE
    assert not standin.jobs.asked[-1].spec.HasField("submit_directory")


def test_a_plain_submission_imports_no_model_parser_or_library(standin: Standin) -> None:
    script = (
        "import sys; from cotenant.cli.main import run; code = run(['submit', '--gpus', '1', '--', 'true']);"
        "heavy = ('grpc', 'asyncio', 'typer', 'yaml', 'dataclasses', 'ssl', 'rich', 'cotenant.core.model.job');"
        "print([name for name in heavy if name in sys.modules], code, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stderr == "[] 0\n"


def test_a_gpu_has_as_many_parts_as_in_the_model() -> None:
    assert units.WHOLE_GPU_MILLI == WHOLE_GPU_MILLI
    assert JOB_FIELDS.keys() <= quick_submit.HANDLED
