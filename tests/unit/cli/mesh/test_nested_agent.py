"""The options of an agent in a job of another system."""

from __future__ import annotations

import os
import time

import pytest

from cotenant.cli.mesh.nested_agent import NestedOptions, nested_settings, read_nesting
from cotenant.cli.outcome import CommandError
from cotenant.node_agent.probes.outer_job import Nesting, OuterJob

SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_END_TIME": "99", "SLURM_JOB_NUM_NODES": "2", "PATH": os.defpath}


def test_it_finds_out_by_itself_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_nesting(NestedOptions(), {}) is None
    assert capsys.readouterr().err == ""
    nesting = read_nesting(NestedOptions(duration="1h", drain_before="10m"), SLURM)
    assert nesting is not None
    assert nesting.drain_time is not None
    assert 2990 < nesting.drain_time - time.time() < 3010
    assert "nested in Slurm job 12: SLURM_JOB_ID is set; at most all cores, no GPUs, 1h left" in capsys.readouterr().err


def test_it_can_be_turned_off_and_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_nesting(NestedOptions(nested=False), SLURM) is None
    assert "not nested: --no-nested was given" in capsys.readouterr().err
    nesting = read_nesting(NestedOptions(nested=True, idle="5m"), {})
    assert nesting is not None
    assert (nesting.job.id, nesting.drain_time, nesting.idle_seconds) == (f"process/{os.getppid()}", None, 300.0)


def test_a_short_time_is_not_used_up_by_the_margin() -> None:
    nesting = read_nesting(NestedOptions(duration="2m"), SLURM)
    assert nesting is not None
    assert nesting.drain_time is not None
    assert 55 < nesting.drain_time - time.time() < 65


def test_every_invalid_option_is_named() -> None:
    with pytest.raises(CommandError) as error:
        read_nesting(NestedOptions(nested=True, until="soon", drain_before="x", idle="-1"), {})
    assert [detail.split()[0] for detail in error.value.details] == ["--drain-before", "--idle", "--until"]
    with pytest.raises(CommandError, match="--for and --idle must be used with --nested"):
        read_nesting(NestedOptions(duration="1h", idle="5m"), {})


def test_settings_never_offer_more_than_the_outer_job_has() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    nesting = Nesting(OuterJob("slurm/1", "", cpus_max=1, memory_bytes=1000))
    settings = nested_settings(nesting, None, 5000)
    assert (settings["cpus"], settings["memory_bytes"]) == ((allowed[0],), 1000)
    settings = nested_settings(Nesting(OuterJob("slurm/1", "")), None, None)
    assert (settings["cpus"], settings["memory_bytes"]) == (None, None)
