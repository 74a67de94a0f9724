"""What Slurm has and Cotenant has not: refused with what it would have meant."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.paths import ROOT

from cotenant.cli.outcome import CommandError
from cotenant.cli.slurm import finding, sbatch, scontrol
from cotenant.cli.slurm.job_spec import Script, submission_of
from cotenant.cli.slurm.outcome import OF_ANOTHER, SlurmError, of_mesh
from cotenant.core.model.job_number import id_of
from cotenant.v1 import job_pb2

NUMBER = "32988737685313719"


def refused(text: str) -> str:
    """Return why a dependency is refused."""
    with pytest.raises(SlurmError) as error:
        submission_of({"dependency": text}, Script("true", "wrap"), "eve", lambda words: None)
    [line] = error.value.lines
    assert line.startswith(f"Batch job submission failed: Job dependency problem: --dependency={text}")
    return line


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (f"aftercorr:{NUMBER}", "after the other array's task with its index"),
        (f"afterok:{NUMBER}?afterany:{NUMBER}", "after any of several jobs"),
    ],
)
def test_a_dependency_that_is_not_expressed_says_what_it_would_mean(text: str, meaning: str) -> None:
    assert meaning in refused(text)


@pytest.mark.parametrize("text", ["afterwards:1", "afterok", "afterok:", "afterok:17+5", "after:17+5h", "after:17+"])
def test_a_dependency_that_is_none_is_refused(text: str) -> None:
    assert refused(text).endswith(text)


def test_expressed_dependencies_are_accepted() -> None:
    text = f"afterok:{NUMBER}:{NUMBER}_7,after:{NUMBER},singleton"
    made = submission_of({"dependency": text}, Script("true", "wrap"), "eve", lambda words: None)
    assert (len(made.spec.dependencies), made.singleton) == (3, True)


def test_fixed_fields_are_named_as_slurm_spells_them() -> None:
    with pytest.raises(SlurmError) as error:
        scontrol.main(["update", f"jobid={NUMBER}", "timemin=5", "NUMNODES=2", "Priority=3"])
    assert error.value.lines == (
        "slurm_update error: Requested operation is presently disabled: TimeMin, NumNodes of a submitted job cannot "
        "be changed",
        "hint: cancel it, and submit it again with other options",
    )


def test_unknown_fields_are_refused_as_slurm_does() -> None:
    with pytest.raises(SlurmError) as error:
        scontrol.main(["update", f"jobid={NUMBER}", "Speed=5", "TimeLimit=5", "Colour=red"])
    assert error.value.lines == (
        "Update of this parameter is not supported: speed=5",
        "Update of this parameter is not supported: colour=red",
        "Request aborted",
    )


def test_jobs_of_others_are_refused_as_slurm_does() -> None:
    told = f"job 7kq belongs to ann; {OF_ANOTHER}"
    assert of_mesh(CommandError(told), "Kill job error on job id 17: ").lines == (
        f"Kill job error on job id 17: Access/permission denied: {told}",
    )
    assert OF_ANOTHER in (ROOT / "services/queue/jobs/visibility.py").read_text(), "the queue says so"


def job_of(start_seconds: int) -> job_pb2.Job:
    """A job with the number `NUMBER`, started at that time; 0: not yet."""
    attempt = job_pb2.Attempt()
    if start_seconds:
        attempt.start_time.FromSeconds(start_seconds)
    return job_pb2.Job(id=id_of(int(NUMBER)), attempt=attempt)


async def submitted(monkeypatch: pytest.MonkeyPatch, words: str, start_seconds: int) -> job_pb2.JobSpec:
    """Return what is submitted while another job is as `job_of` says."""

    async def found(*_: object) -> list[job_pb2.Job]:
        return [job_of(start_seconds)]

    monkeypatch.setattr(finding, "find_one", found)
    made = submission_of({"dependency": words}, Script("true", "wrap"), "eve", lambda text: None)
    mesh: Any = None
    for job_id, minutes in made.delays:
        await sbatch._delay(mesh, made.spec, job_id, minutes)
    return made.spec


async def test_a_delay_counts_from_the_start_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    started = int(time.time())
    spec = await submitted(monkeypatch, f"after:{NUMBER}+5:{NUMBER}+90", started)
    assert spec.begin_time.seconds == started + 90 * 60
    assert [one.condition for one in spec.dependencies] == [job_pb2.DEPENDENCY_CONDITION_AFTER_STARTED] * 2
    over = await submitted(monkeypatch, f"after:{NUMBER}+5", started - 301)
    assert not over.HasField("begin_time")
    with pytest.raises(SlurmError, match="the job has not started"):
        await submitted(monkeypatch, f"after:{NUMBER}+5", 0)
