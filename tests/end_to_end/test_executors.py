"""Executors of other frameworks over a live mesh: `concurrent.futures`, submitit and Hydra."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import submitit
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

import cotenant
from cotenant.client import remote_functions
from cotenant.client import submitit_executor as plugin
from cotenant.rpc.access import AccessError

SECONDS_MAX = 60.0


@pytest.fixture(autouse=True)
def folder(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the mesh as the configured one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COTENANT_STATE_DIR", str(mesh.state_dir))
    remote_functions.own_client.cache_clear()
    yield tmp_path
    remote_functions.own_client(os.getpid()).close()
    remote_functions.own_client.cache_clear()


def test_an_executor_runs_calls_as_jobs_and_maps_in_order() -> None:
    def half(number: int) -> float:  # in here, so that workers need not import this module
        return 10 / number

    with cotenant.Executor(cpus=1, workers=2, name="halves") as executor:
        single = executor.submit(half, 4)
        assert list(executor.map(half, [1, 2, 5], timeout=SECONDS_MAX)) == [10.0, 5.0, 2.0]
        with pytest.raises(ZeroDivisionError):
            list(executor.map(half, [1, 0]))
    assert single.done()
    assert single.result() == 2.5
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(half, 1)
    assert {job.name for job in remote_functions.own_client(os.getpid()).jobs(all=True)} >= {"halves"}


def test_a_shutdown_can_cancel_the_jobs_that_run() -> None:
    executor = cotenant.Executor(cpus=1, name="endless")
    future = executor.submit(lambda: __import__("time").sleep(1000))
    client = remote_functions.own_client(os.getpid())
    until(lambda: [job.phase for job in client.jobs(name="endless")] == ["running"], "the job runs")
    executor.shutdown(cancel_futures=True)
    with pytest.raises(CancelledError):
        future.result()
    until(lambda: client.jobs(name="endless") == [], "cancellation of its job")


def test_a_map_that_takes_too_long_is_a_timeout_and_ends() -> None:
    with cotenant.Executor(cpus=1, name="slow") as executor, pytest.raises(TimeoutError):
        list(executor.map(lambda _: __import__("time").sleep(1000), [1], timeout=0.1))
    assert executor._running == set()


def test_submitit_runs_functions_and_returns_results_and_errors(folder: Path) -> None:
    executor = submitit.AutoExecutor(folder=folder / "logs", cluster="cotenant")
    executor.update_parameters(timeout_min=5, cpus_per_task=1, mem_gb=0.25, name="pickled", cotenant_labels={"a": "b"})

    def add(first: int, second: int) -> tuple[int, str]:
        print("adding")
        return first + second, submitit.JobEnvironment().job_id

    def fail() -> None:
        raise ValueError("no luck")

    job = executor.submit(add, 5, second=7)
    failing = executor.submit(fail)
    assert job.result() == (12, job.job_id)
    assert "adding" in str(job.stdout())
    assert "no luck" in str(failing.exception())
    found = cotenant.Client().job(job.job_id)
    assert found.wait(SECONDS_MAX).succeeded
    spec = found.status().details
    assert (spec["name"], spec["labels"]) == ("pickled", {"a": "b"})
    assert job.watcher.get_state(job.job_id, mode="force") == "COMPLETED"
    until(lambda: failing.watcher.get_state(failing.job_id, mode="force") == "FAILED", "its state")
    assert plugin.CotenantWatcher(1).get_state("nobody", mode="force") == "MISSING"


def test_submitits_tasks_have_ranks_and_a_job_can_be_cancelled(folder: Path) -> None:
    executor = submitit.AutoExecutor(folder=folder / "%j", cluster="cotenant")
    executor.update_parameters(timeout_min=5, nodes=1, tasks_per_node=2, gpus_per_node=2, name="ranks")

    def rank() -> tuple[int, int]:
        found = submitit.JobEnvironment()
        return found.global_rank, found.num_tasks

    assert executor.submit(rank).results() == [(0, 2), (1, 2)]
    executor.update_parameters(tasks_per_node=1, gpus_per_node=0, stderr_to_stdout=True)
    endless = executor.submit(lambda: __import__("time").sleep(1000))
    endless.cancel()
    until(lambda: endless.watcher.get_state(endless.job_id, mode="force") == "CANCELLED", "its cancellation")
    assert endless.done()
    executor.update_parameters(tasks_per_node=2, gpus_per_node=3)
    with pytest.raises(ValueError, match="gpus_per_node=3 cannot be divided among tasks_per_node=2"):
        executor.submit(rank)


def test_submitit_prefers_a_mesh_to_local_processes_where_one_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", {}.get)  # no Slurm either, which submitit would take first
    assert submitit.AutoExecutor.which() == "cotenant"
    monkeypatch.setattr(plugin, "find", lambda *_: (_ for _ in ()).throw(AccessError("nothing")))
    assert submitit.AutoExecutor.which() == "local"


PROGRAM = """
import os
import hydra

@hydra.main(version_base=None)
def main(config):
    if config.rate > 1:
        raise ValueError(f"diverged at {config.rate}")
    print("rate", config.rate, "in", os.environ["COTENANT_JOB_ID"], hydra.core.hydra_config.HydraConfig.get().job.num)

main()
"""


@pytest.mark.deep
def test_a_multirun_of_hydra_runs_as_jobs(folder: Path) -> None:
    (folder / "train.py").write_text(PROGRAM)
    launch = [sys.executable, "train.py", "-m", "hydra/launcher=cotenant", "hydra.sweep.dir=sweep"]
    fields = ["hydra.launcher.cpus=1", "hydra.launcher.workers=2", "hydra.launcher.labels={sweep: rates}"]
    done = subprocess.run([*launch, *fields, "+rate=0.1,0.2,3"], capture_output=True, text=True, check=False)
    assert "Launching 3 jobs on Cotenant" in done.stdout
    assert "diverged at 3" in done.stderr
    assert done.returncode == 1
    jobs = cotenant.Client().jobs(all=True, name="train")
    assert [job.status().details["labels"] for job in jobs] == [{"sweep": "rates"}] * 2
    assert sorted(path.name for path in (folder / "sweep").iterdir() if path.is_dir()) == ["0", "1", "2"]
    assert (folder / "sweep" / "1" / ".hydra" / "overrides.yaml").read_text() == "- +rate=0.2\n"
    bad = subprocess.run([*launch, "hydra.launcher.cpus=many", "+rate=1"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "cpus" in bad.stderr
