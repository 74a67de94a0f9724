"""The Python API against a live mesh."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.paths import ROOT

import cotenant
from cotenant.client.mapping import SCRIPT

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


def test_a_job_is_held_resumed_fetched_from_and_run_again(client: cotenant.Client, folder: Path) -> None:
    script = "mkdir out; echo $WORD > out/word; echo $WORD"
    job = client.submit(script, cpus=1, hold=True, workdir="none", env={"WORD": "first"}, name="again")
    assert job.phase == "suspended"
    job.resume()
    assert job.result(SECONDS_MAX) == "first\n"
    assert (job.fetch("out/word"), job.fetch(to="all")) == (1, 1)
    assert (folder / "word").read_text() == (folder / "all" / "out" / "word").read_text() == "first\n"
    with pytest.raises(cotenant.InvalidArgument, match="stays in it"):
        job.fetch("../word")
    with pytest.raises(cotenant.FailedPrecondition, match="'nothing': no such file"):
        job.fetch("nothing")
    other = job.rerun()
    assert isinstance(other, cotenant.Job)
    assert (other.id != job.id, other.name, other.result(SECONDS_MAX)) == (True, "again", "first\n")
    [task] = client.submit("echo $COTENANT_ARRAY_INDEX", cpus=1, array=[7]).wait(SECONDS_MAX)
    same = task.rerun()
    assert isinstance(same, cotenant.JobArray)
    assert same.result(SECONDS_MAX) == ["7\n"]
    assert client.submit("sleep 1000", cpus=1).suspend().phase in ("stopping", "suspended")


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


def test_a_secret_reaches_a_job_and_no_answer(client: cotenant.Client) -> None:
    made = client.set_secret("API_TOKEN", "very private")
    assert (made.name, made.tenant, made.size_bytes) == ("API_TOKEN", "default", 12)
    assert made.created is not None
    assert client.secrets() == client.secrets(tenant="default") == [made]
    assert "very private" not in repr(made)
    job = client.submit("echo ${#API_TOKEN}", cpus=1, secrets="API_TOKEN")
    assert job.result(SECONDS_MAX) == "12\n"
    with pytest.raises(cotenant.InvalidArgument) as caught:
        client.set_secret("2nd", b"")
    assert [one.field for one in caught.value.fields] == ["name", "value"]
    client.delete_secret("API_TOKEN")
    assert client.secrets() == []
    with pytest.raises(cotenant.NotFound):
        client.delete_secret("API_TOKEN")


def test_a_schedule_is_created_paused_run_and_deleted(client: cotenant.Client) -> None:
    schedule = client.create_schedule(
        ["echo", "done"], every="@daily", time_zone="Europe/Berlin", overlap="queue", cpus=1, name="nightly"
    )
    status = schedule.status()
    assert (status.name, status.every, status.time_zone) == ("nightly", "@daily", "Europe/Berlin")
    assert (status.overlap, status.paused, status.last_job) == ("queue", False, "")
    assert status.next_time is not None
    assert (schedule.pause().next_time, client.schedule(schedule.id).last_status.paused) == (None, True)
    job = schedule.run()
    assert job.result(SECONDS_MAX) == "done\n"
    assert [one.id for one in client.jobs(all=True, labels={"schedule": schedule.id})] == [job.id]
    assert schedule.resume().next_time == status.next_time
    assert [one.id for one in client.schedules()] == [schedule.id]
    schedule.delete()
    assert client.schedules() == []
    with pytest.raises(cotenant.NotFound):
        schedule.status()


def test_a_bad_schedule_names_each_bad_field(client: cotenant.Client) -> None:
    with pytest.raises(cotenant.InvalidArgument) as caught:
        client.create_schedule(["true"], every="61 * * * *", cpus=1)
    assert [one.field for one in caught.value.fields] == ["every"]
    with pytest.raises(cotenant.InvalidArgument, match="overlap: must be one of skip, queue, replace, not 'both'"):
        client.create_schedule(["true"], every="1h", overlap="both")  # type: ignore[arg-type]  # a caller without types


def test_a_repeated_request_id_submits_once(client: cotenant.Client) -> None:
    jobs = [client.submit(["true"], cpus=1, request_id="once") for _ in range(2)]
    assert jobs[0].id == jobs[1].id
    jobs[0].result(SECONDS_MAX)


async def test_the_asynchronous_client_runs_on_its_callers_loop(mesh: Mesh) -> None:
    async with cotenant.AsyncClient(state_dir=mesh.state_dir) as client:
        jobs = [await client.submit(["echo", str(number)], cpus=1) for number in range(2)]
        assert [await job.result() for job in jobs] == ["0\n", "1\n"]
        assert [line async for line in jobs[0].logs()] == ["0"]


@pytest.mark.deep
def test_a_client_survives_a_restart_of_the_mesh(mesh: Mesh, client: cotenant.Client) -> None:
    job = client.submit(["echo", "before"], cpus=1)
    job.wait(SECONDS_MAX)
    mesh.stop()
    with pytest.raises(cotenant.Unavailable):
        job.status()
    mesh.start()
    assert job.result(SECONDS_MAX) == "before\n"


def test_a_map_returns_results_and_exceptions_in_order(client: cotenant.Client, folder: Path) -> None:
    def fails_at_two(number: int) -> int:  # in here, so that workers need not import this module
        if number == 2:
            raise KeyError("two")
        return number * 10

    futures = client.map(fails_at_two, range(4), cpus=1, workers=2)
    assert [future.exception(SECONDS_MAX) is None for future in futures] == [True, True, False, True]
    assert [futures[place].result() for place in (0, 1, 3)] == [0, 10, 30]
    with pytest.raises(KeyError, match="two") as caught:
        futures[2].result()
    assert "in fails_at_two" in str(caught.value.__cause__)
    until(lambda: not list(folder.iterdir()), "removal of the folder")
    assert len(client.jobs(all=True, name="fails_at_two")) == 2


@pytest.mark.deep
def test_the_futures_of_a_map_go_on_after_a_restart_of_the_mesh(
    mesh: Mesh, client: cotenant.Client, folder: Path
) -> None:
    def wait_for_the_gate(number: int) -> int:
        (pathlib.Path.cwd() / f"begun-{number}").touch()
        while not (pathlib.Path.cwd() / "gate").exists():
            time.sleep(0.02)
        return number * 10

    futures = client.map(wait_for_the_gate, range(3), cpus=1, workers=1)
    until(lambda: (folder / "begun-0").exists(), "the first item")
    mesh.stop()
    mesh.start()
    assert not any(future.done() for future in futures)
    (folder / "gate").touch()
    assert [future.result(SECONDS_MAX) for future in futures] == [0, 10, 20]


@pytest.mark.deep
def test_jobs_of_a_killed_client_go_on_if_they_are_kept(mesh: Mesh, client: cotenant.Client, folder: Path) -> None:
    (folder / "script.py").write_text(
        "import cotenant, os, pathlib, signal, time\n"
        "def wait(number):\n"
        "    pathlib.Path('runs').touch()\n"
        "    while not pathlib.Path('gate').exists(): time.sleep(0.02)\n"
        "cotenant.map(wait, range(2), cpus=1, workers=1, name='killed', on_exit='keep')\n"
        "while not pathlib.Path('runs').exists(): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "COTENANT_STATE_DIR": str(mesh.state_dir)}
    killed = subprocess.run([sys.executable, "script.py"], env=environment, check=False, timeout=SECONDS_MAX)
    assert killed.returncode == -signal.SIGKILL
    (folder / "gate").touch()
    assert [job.wait(SECONDS_MAX).phase for job in client.jobs(all=True, name="killed")] == ["succeeded"]
    [kept] = folder.glob(".cotenant-map-*")
    assert kept.is_dir(), "the results stay"


def test_a_worker_that_dies_fails_its_item_only(client: cotenant.Client) -> None:
    futures = client.map(lambda number: os._exit(9) if number == 0 else number, range(3), cpus=1, workers=2)
    with pytest.raises(cotenant.JobFailed, match="status 9"):
        futures[0].result(SECONDS_MAX)
    assert [future.result(SECONDS_MAX) for future in futures[1:]] == [1, 2]


def test_a_decorated_function_runs_as_a_job(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_STATE_DIR", str(mesh.state_dir))

    @cotenant.job(cpus=1, env={"BASE": "100"})
    def add(left: int, right: int = 1) -> int:
        return left + right + int(os.environ["BASE"])

    assert add(1, right=5).result(SECONDS_MAX) == 106
    assert add.__wrapped__.__name__ == "add"


def test_a_node_that_does_not_see_the_folder_says_so(client: cotenant.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = SCRIPT.replace(
        '"$1/plan.json"', '"/another/machine$1/plan.json"'
    )  # stands for a node without the folder
    monkeypatch.setattr("cotenant.client.mapping.SCRIPT", elsewhere)
    [future] = client.map(len, ["abc"], cpus=1)
    with pytest.raises(cotenant.JobFailed, match="this node does not see the folder /"):
        future.result(SECONDS_MAX)


def test_the_fields_of_a_map_are_checked(client: cotenant.Client) -> None:
    with pytest.raises(cotenant.InvalidArgument, match=r"replicas: not allowed .*; workers: must be at least 1"):
        client.map(len, ["abc"], workers=0, replicas=2)
    assert client.map(len, []) == []


def test_jobs_of_a_map_are_cancelled_with_their_process(mesh: Mesh, client: cotenant.Client, folder: Path) -> None:
    (folder / "script.py").write_text(
        "import cotenant, pathlib, time\n"
        "def wait(number):\n"
        "    pathlib.Path('runs').touch()\n"
        "    while True: time.sleep(0.1)\n"
        "cotenant.map(wait, range(1), cpus=1, name='abandoned')\n"
        "while not pathlib.Path('runs').exists(): time.sleep(0.05)\n"
    )
    environment = {**os.environ, "COTENANT_STATE_DIR": str(mesh.state_dir)}
    subprocess.run([sys.executable, "script.py"], env=environment, check=True, timeout=SECONDS_MAX)
    assert [job.wait(SECONDS_MAX).phase for job in client.jobs(all=True, name="abandoned")] == ["cancelled"]
    assert list(folder.glob(".cotenant-map-*")) == []


@pytest.mark.deep
def test_the_examples_of_the_page_run(mesh: Mesh, folder: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    (folder / "page.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    environment = {**os.environ, "COTENANT_STATE_DIR": str(mesh.state_dir)}
    done = subprocess.run(
        [sys.executable, "page.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS_MAX,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "hello"
