"""Programs written for Slurm, unmodified, on a real mesh: `make test-slurm-clients` installs and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.end_to_end.commands import SECONDS_MAX
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.test_slurm import Slurm
from tests.support.paths import ROOT

CLIENTS = ROOT / ".cotenant" / "slurm-clients" / "bin"
PYTHON = str(CLIENTS / "python")
LONG_SECONDS_MAX = 5 * SECONDS_MAX  # each starts interpreters that import much

pytestmark = [
    pytest.mark.group("slurm-clients"),
    pytest.mark.skipif(
        not (CLIENTS / "snakemake").exists(),
        reason="the programs are not installed; `make test-slurm-clients` installs them",
    ),
]

DASK = """
import sys
from dask.distributed import Client
from dask_jobqueue import SLURMCluster

with SLURMCluster(
    cores=1, processes=1, memory="1GB", walltime="00:10:00", python=sys.executable, interface="lo",
    log_directory="logs", local_directory="scratch", scheduler_options={"dashboard_address": ":0"},
) as cluster, Client(cluster) as client:
    cluster.scale(jobs=2)
    client.wait_for_workers(2, timeout=120)
    print(client.gather(client.map(lambda number: number * number, range(5))))
"""
PARSL = """
import os, parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.launchers import SrunLauncher
from parsl.providers import SlurmProvider

@parsl.python_app
def square(number):
    return number * number

provider = SlurmProvider(
    partition="default", account="default", nodes_per_block=1, cores_per_node=1, mem_per_node=1, init_blocks=1,
    max_blocks=1, walltime="00:10:00", exclusive=False, launcher=SrunLauncher(),
)
executor = HighThroughputExecutor(label="mesh", address="127.0.0.1", max_workers_per_node=1, provider=provider)
with parsl.load(Config(executors=[executor], run_dir="runs", strategy="none")):
    print([future.result(timeout=120) for future in [square(number) for number in range(5)]])
"""
WORKFLOW = """
rule total:
    input: "part1.txt", "part2.txt"
    output: "total.txt"
    shell: "cat {input} > {output}"
rule part:
    output: "part{number}.txt"
    shell: "echo {wildcards.number} > {output}"
"""
SNAKEMAKE = (
    *("--executor", "slurm", "--jobs", "2", "--latency-wait", "30"),
    *("--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2"),
    *("--default-resources", "slurm_account=default", "slurm_partition=default", "mem_mb=800", "runtime=10"),
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The commands, in an environment that has the programs."""
    mesh = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:4", "--nodes", "2")
    try:
        mesh.start()
        made = Slurm(mesh, tmp_path_factory.mktemp("user"))
        before, path = made.environment["PATH"].split(os.pathsep, 1)
        made.environment["PATH"] = os.pathsep.join((before, str(CLIENTS), path))
        yield made
    finally:
        mesh.close()


def test_dask_jobqueue_starts_workers(slurm: Slurm) -> None:
    ended = slurm(PYTHON, slurm.script("with_dask.py", DASK), seconds=LONG_SECONDS_MAX)
    assert ended.out == "[0, 1, 4, 9, 16]\n", ended.err


def test_parsl_starts_a_block(slurm: Slurm) -> None:
    ended = slurm(PYTHON, slurm.script("with_parsl.py", PARSL), seconds=LONG_SECONDS_MAX)
    assert ended.out == "[0, 1, 4, 9, 16]\n", ended.err


def test_snakemake_runs_a_workflow(slurm: Slurm) -> None:
    slurm.script("Snakefile", WORKFLOW)
    ended = slurm("snakemake", *SNAKEMAKE, seconds=LONG_SECONDS_MAX)
    assert slurm.read("total.txt") == "1\n2\n", ended.err
