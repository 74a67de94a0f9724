"""The Python API against a live mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

import cotenant

SECONDS_MAX = 60.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where jobs start."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def client(mesh: Mesh) -> Iterator[cotenant.Client]:
    with cotenant.Client(state_dir=mesh.state_dir) as client:
        yield client


def test_a_job_is_submitted_found_followed_and_read(client: cotenant.Client, folder: Path) -> None:
    script = 'import os; print(os.environ["GREETING"], os.getcwd())'
    job = client.submit([sys.executable, "-c", script], cpus=1, name="<hello>", env={"GREETING": "hi"})
    assert job.result(SECONDS_MAX) == f"hi {folder}\n"
    assert (job.phase, job.name) == ("succeeded", "<hello>")
    assert list(job.logs()) == [f"hi {folder}"]
    found = client.job("<hello>")
    assert found.id == job.id
    assert [one.id for one in client.jobs(all=True, name="<hello>")] == [job.id]
    assert "&lt;hello&gt;" in client.jobs(all=True)._repr_html_()
    assert client.jobs() == []


def test_a_failure_has_the_exit_code_and_the_last_lines(client: cotenant.Client) -> None:
    job = client.submit("seq 30; exit 3", cpus=1)
    with pytest.raises(cotenant.JobFailed) as caught:
        job.result(SECONDS_MAX)
    assert (caught.value.job_id, caught.value.exit_code) == (job.id, 3)
    assert caught.value.log_tail.splitlines() == [str(number) for number in range(11, 31)]
    assert "ended with status 3" in str(caught.value)


def test_a_waiting_job_is_explained_and_cancelled(client: cotenant.Client, folder: Path) -> None:
    holder = client.submit("while [ ! -e go ]; do sleep 0.05; done", gpus=4, cpus=1)
    until(lambda: holder.phase == "running", "the first job runs")
    job = client.submit("true", gpus=4, cpus=1, after=holder)
    with pytest.raises(cotenant.WaitTimeout):
        job.wait(0.1)
    assert holder.id in job.explain().summary
    (folder / "go").touch()
    assert job.wait(SECONDS_MAX).succeeded
    endless = client.submit(["sleep", "1000"], cpus=1)
    endless.cancel()
    with pytest.raises(cotenant.JobCancelled):
        endless.result(SECONDS_MAX)


def test_output_is_followed_while_the_job_runs(client: cotenant.Client, folder: Path) -> None:
    job = client.submit("echo first; while [ ! -e go ]; do sleep 0.05; done; printf last", cpus=1)
    lines = job.logs()
    assert next(lines) == "first"
    (folder / "go").touch()
    assert list(lines) == ["last"]


def test_an_array_has_a_job_for_each_index(client: cotenant.Client) -> None:
    array = client.submit("echo $COTENANT_ARRAY_INDEX", cpus=1, array=range(2, 7, 2))
    assert array.result(SECONDS_MAX) == ["2\n", "4\n", "6\n"]
    assert array.status() == {"succeeded": 3}
    found = client.find(array.id)
    assert isinstance(found, cotenant.JobArray)
    with pytest.raises(cotenant.InvalidArgument, match="is an array of 3 jobs"):
        client.job(array.id)


def test_errors_of_the_server_name_every_field(client: cotenant.Client) -> None:
    with pytest.raises(cotenant.InvalidArgument) as caught:
        client.submit(["true"], after=["nobody"], after_ok="none")
    assert [one.field for one in caught.value.fields] == ["after", "after_ok"]
    with pytest.raises(cotenant.NotFound):
        client.job("nobody")
    with pytest.raises(cotenant.InvalidArgument, match="request_id"):
        client.submit(["true"], request_id="x" * 200)


def test_a_repeated_request_id_submits_once(client: cotenant.Client) -> None:
    jobs = [client.submit(["true"], cpus=1, request_id="once") for _ in range(2)]
    assert jobs[0].id == jobs[1].id
    jobs[0].result(SECONDS_MAX)


async def test_the_asynchronous_client_runs_on_its_callers_loop(mesh: Mesh) -> None:
    async with cotenant.AsyncClient(state_dir=mesh.state_dir) as client:
        jobs = [await client.submit(["echo", str(number)], cpus=1) for number in range(2)]
        assert [await job.result() for job in jobs] == ["0\n", "1\n"]
        assert [line async for line in jobs[0].logs()] == ["0"]


def test_a_client_survives_a_restart_of_the_mesh(mesh: Mesh, client: cotenant.Client) -> None:
    job = client.submit(["echo", "before"], cpus=1)
    job.wait(SECONDS_MAX)
    mesh.stop()
    with pytest.raises(cotenant.Unavailable):
        job.status()
    mesh.start()
    assert job.result(SECONDS_MAX) == "before\n"
