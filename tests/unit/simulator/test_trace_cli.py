"""`cotenant trace`, and the options of `cotenant simulate` about traces, as their users see them."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from cotenant.cli.main import run
from cotenant.simulator import load


def cotenant(*arguments: str) -> tuple[int, str, str]:
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        code = run(arguments)
    return code, stdout.getvalue(), " ".join(stderr.getvalue().split())


def test_a_trace_is_summed_up_for_people_and_for_programs() -> None:
    code, told, _ = cotenant("trace", "show", "sample")
    assert code == 0
    assert "1: 193, 2: 51, 4: 14, 16: 2" in told
    figures = json.loads(cotenant("trace", "show", "sample", "--json")[1])
    assert (figures["jobs"], figures["format"], figures["kinds"]) == (260, "itp", {"training": 260})
    hours = sum(job.work_seconds * job.roles[0].replicas for job in load("sample").jobs) / 3600
    assert figures["gpu_hours"] == pytest.approx(hours)
    assert figures["sizes"] == {"1": 193, "2": 51, "4": 14, "16": 2}


def test_shares_of_gpus_are_counted_together(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submitted_seconds,work_seconds,gpu_milli\na,0,1,300\nb,0,1,500\nc,0,1,2000\n")
    assert "jobs by GPUs    <1: 2, 2: 1" in cotenant("trace", "show", str(file))[1]


def test_skipped_rows_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submitted_seconds,work_seconds\na,0,1\n" + "b,0,0\n" * 12)
    assert cotenant("trace", "show", str(file))[0] == 2
    code, told, beside = cotenant("trace", "show", str(file), "--skip-bad-rows")
    assert (code, beside.count("skipped: ")) == (0, 11)
    assert "skipped: 2 more rows" in beside
    assert "skipped rows    12" in told


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_converted_trace_simulates_like_the_original(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"jobs.{ending}"
    code, told, beside = cotenant("trace", "convert", "sample", str(file))
    assert (code, told) == (0, "")
    assert f"wrote 260 jobs to {file}" in beside
    figures = [
        json.loads(cotenant("simulate", "--trace", source, "--cluster", "2x8", "--json")[1])
        for source in ("sample", str(file))
    ]
    for figure in figures:
        del figure["wall_seconds"], figure["trace"], figure["format"]
    assert figures[0] == figures[1]


def test_a_trace_converted_with_an_overlay_holds_the_jobs_that_a_simulation_with_it_has(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    overlay = "models=synergy,cpu-jobs=openb:0.01,deadlines=2,tenants=3"
    assert cotenant("trace", "convert", "sample", str(file), "--overlay", overlay, "--cluster", "2x8x96")[0] == 0
    arguments = ("--cluster", "2x8x96", "--queue", "las", "--json")
    laid, read = (
        json.loads(cotenant("simulate", *source, *arguments)[1])
        for source in (("--trace", "sample", "--overlay", overlay), ("--trace", str(file)))
    )
    assert laid["overlay"] == {**dict(pair.split("=") for pair in overlay.split(",")), "seed": "0"}
    assert read["overlay"] == {}
    assert laid["jobs"] > 260
    assert [laid[name] for name in ("jobs", "avg_jct_seconds", "events")] == [
        read[name] for name in ("jobs", "avg_jct_seconds", "events")
    ]


def test_the_summary_shows_the_overlay() -> None:
    told = cotenant(
        "simulate", "--trace", "sample", "--cluster", "2x8", "--overlay", "tenants=2", "--overlay", "seed=4"
    )
    assert "tenants 2, seed 4" in told[1]


def test_memory_is_ignored_with_a_note_if_the_cluster_declares_none(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submitted_seconds,work_seconds,memory_bytes\na,0,1,1024\nb,0,1,\n")
    code, told, beside = cotenant("simulate", "--trace", str(file), "--cluster", "1x1")
    assert (code, "2 of 2" in told) == (0, True)
    assert "note: 1 jobs request memory; the cluster declares none, so the requests are ignored" in beside
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("- {gpus: 1, memory_bytes: 1000}")
    assert "1 of 2" in cotenant("simulate", "--trace", str(file), "--cluster", str(cluster))[1]


def test_gpu_shares_without_a_shareable_node_give_a_note_with_a_hint(tmp_path: Path) -> None:
    file, cluster = tmp_path / "jobs.csv", tmp_path / "cluster.yaml"
    file.write_text("job_id,submitted_seconds,work_seconds,gpu_milli\na,0,1,300\nb,0,1,1000\n")
    simulate = ("simulate", "--trace", str(file), "--cluster")
    _, told, beside = cotenant(*simulate, "1x1")
    assert "note: 1 jobs request a share of a GPU, which no node of the cluster offers" in beside
    assert "1 of 2" in told
    _, told, beside = cotenant(*simulate, "1x1", "--overlay", "fractions=whole")
    assert ("2 of 2" in told, beside) == (True, "")
    cluster.write_text("- {gpus: 1, shareable: true}")
    _, told, beside = cotenant(*simulate, str(cluster))
    assert ("2 of 2" in told, beside) == (True, "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("trace", "show", "/nowhere.csv"), "/nowhere.csv cannot be read: No such file or directory"),
        (("trace", "show", "sample", "--format", "tiresia"), "unknown trace format 'tiresia'; did you mean tiresias"),
        (("trace", "shw", "sample"), "no such command 'shw'"),
        (("trace",), "missing command"),
        (("trace", "convert", "sample", "jobs.txt"), "the ending selects the format"),
        (("trace", "convert", "sample", "x.csv", "--overlay", "tenants=2"), "set it with --cluster"),
        (("trace", "convert", "sample", "x.csv", "--overlay", "tenant=2"), "did you mean tenants?"),
        (("simulate", "--trace", "/nowhere", "--cluster", "2x8", "--overlay", "tenants=0"), "overlay tenants: must be"),
        (
            ("simulate", "--trace", "sample", "--cluster", "2x8x2", "--overlay", "cpu-jobs=openb"),
            "no node of the cluster",
        ),
    ],
)
def test_invalid_input_is_reported_in_a_sentence(arguments: tuple[str, ...], told: str) -> None:
    code, out, beside = cotenant(*arguments)
    assert (code, out) == (2, "")
    assert told in beside
    assert "Traceback" not in beside
