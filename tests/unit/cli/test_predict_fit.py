"""`cotenant predict fit`: fits of measurements."""

from __future__ import annotations

import math
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.conftest import Shell

from cotenant.cli.outcome import ExitCode
from cotenant.cli.research.predicting.chart import Chart, draw
from cotenant.cli.research.predicting.measurements import KINDS, BadMeasurements, read_measurements
from cotenant.core.prediction import core_curve

RATES = "cores,rate\n1,10\n2,20\n4,39\n16,60\n"
SCALING = "gpus,nodes,rate\n1,1,1.0\n2,1,0.909\n2,2,0.769\n"
TEAMS = "workers,servers,rate\n" + "".join(
    f"{workers},{servers},{1 / (4 / workers + 0.5 + 0.2 * workers / servers):.6f}\n"
    for workers, servers in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 4))
)
BATCHES = "batch,seconds\n" + "".join(f"{size},{0.01 + 0.002 * size}\n" for size in (1, 2, 4, 8, 16) * 4)


def losses(last: int = 2000, *, noise: float = 0.005) -> str:
    chance = random.Random(7)
    reported = (f"{k},{1 / (0.002 * k + 0.5) + 0.3 + chance.gauss(0, noise):.5f}\n" for k in range(10, last, 10))
    return "step,loss\n" + "".join(reported)


def fit(shell: Shell, path: Path, text: str, *options: str) -> Any:
    path.write_text(text)
    ended = shell("predict", "fit", str(path), "--json", *options)
    assert ended.code == ExitCode.DONE, ended.err
    return ended.json


def test_the_header_determines_the_kind(shell: Shell, tmp_path: Path) -> None:
    texts = {"cores": RATES, "scaling": SCALING, "parameter-server": TEAMS, "loss": losses(), "latency": BATCHES}
    assert set(texts) == set(KINDS)
    for kind, text in texts.items():
        assert fit(shell, tmp_path / "m.csv", text)["kind"] == kind


def test_theta_and_rates_match_the_predictors_curve(shell: Shell, tmp_path: Path) -> None:
    [reported] = fit(shell, tmp_path / "rates.csv", RATES)["fits"]
    curve = core_curve.fit(
        [core_curve.Point(1, 10.0), core_curve.Point(2, 20.0), core_curve.Point(4, 39.0), core_curve.Point(16, 60.0)]
    )
    assert (reported["theta"]["cores"], reported["theta"]["low"], reported["theta"]["high"]) == (6, *curve.interval)
    assert reported["theta"]["known"]
    assert {one["cores"]: one["rate_per_second"] for one in reported["rates"]} == {
        cores: curve.rate(cores) for cores in core_curve.ladder(16)
    }
    assert all(one["p10"] < one["rate_per_second"] < one["p90"] for one in reported["rates"])


def test_a_rate_that_still_rises_leaves_theta_unknown(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    [reported] = fit(shell, path, "cores,rate\n1,10\n2,20\n4,40\n", "--cores-max", "16")["fits"]
    assert not reported["theta"]["known"]
    assert reported["next"]["cores"][0] == 16
    assert "has not leveled off at 4 cores" in shell("predict", "fit", str(path)).out


def test_models_and_phases_have_separate_fits(shell: Shell, tmp_path: Path) -> None:
    text = "model,phase,cores,rate,note\nres18,,1,10,x\nres18,,8,60,x\nres18,validation,1,30,y\nvgg,,1,3,z\n"
    reported = fit(shell, tmp_path / "m.csv", text)
    assert [(one["model"], one["phase"]) for one in reported["fits"]] == [
        ("res18", None),
        ("res18", "validation"),
        ("vgg", None),
    ]
    assert reported["columns_ignored"] == ["note"]


def test_extrapolated_placements_have_less_confidence(shell: Shell, tmp_path: Path) -> None:
    [reported] = fit(shell, tmp_path / "m.csv", SCALING)["fits"]
    rates = {(one["gpus"], one["nodes"]): one for one in reported["rates"]}
    assert rates[4, 2]["rate_per_second"] == pytest.approx(1 / 1.4, rel=0.02)
    assert rates[8, 4]["confidence"] < rates[2, 2]["confidence"]
    assert reported["next"]["placements"] == []


def test_genies_training_placements_are_measured_first(shell: Shell, tmp_path: Path) -> None:
    [reported] = fit(shell, tmp_path / "m.csv", "gpus,nodes,rate\n2,1,5\n")["fits"]
    assert reported["next"]["placements"] == [{"gpus": 1, "nodes": 1}, {"gpus": 2, "nodes": 2}]


def test_four_teams_are_too_few(shell: Shell, tmp_path: Path) -> None:
    few = "".join(TEAMS.splitlines(keepends=True)[:5])
    [reported] = fit(shell, tmp_path / "m.csv", few)["fits"]
    assert (reported["known"], reported["why_not"]) == (False, "4 teams measured, 5 needed")
    [reported] = fit(shell, tmp_path / "m.csv", TEAMS)["fits"]
    four = next(one for one in reported["rates"] if (one["workers"], one["servers"]) == (4, 4))
    assert four["rate_per_second"] == pytest.approx(1 / 1.7, rel=0.05)


def test_a_loss_curve_gives_the_goal_step_and_the_remaining_time(shell: Shell, tmp_path: Path) -> None:
    [reported] = fit(shell, tmp_path / "l.csv", losses(), "--goal-loss", "0.45", "--rate", "10")["fits"]
    truth = (1 / 0.15 - 0.5) / 0.002
    assert reported["predictable"]
    assert reported["goal_step"] == pytest.approx(truth, rel=0.1)
    assert reported["remaining_seconds"] == pytest.approx((reported["goal_step"] - 1990) / 10)
    assert reported["remaining_p10_seconds"] < reported["remaining_seconds"] < reported["remaining_p90_seconds"]


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (losses(), (), "no goal; set --goal-loss"),
        ("step,loss\n1,0.5\n2,0.4\n", ("--goal-loss", "0.1"), "too few"),
        ("step,loss\n" + "".join(f"{k},{0.1 * k}\n" for k in range(1, 50)), ("--goal-loss", "0.1"), "does not fall"),
        (
            "step,loss\n" + "".join(f"{k},nan\n" for k in range(1, 50)),
            ("--goal-loss", "0.1"),
            "recent losses are not finite",
        ),
        (losses(), ("--goal-loss", "0.1"), "above its goal"),
    ],
)
def test_an_unpredictable_loss_curve_is_an_answer(
    shell: Shell, tmp_path: Path, text: str, options: tuple[str, ...], why: str
) -> None:
    [reported] = fit(shell, tmp_path / "l.csv", text, *options)["fits"]
    assert not reported["predictable"]
    assert why in reported["why_not"]
    ended = shell("predict", "fit", str(tmp_path / "l.csv"), *options)
    assert (ended.code, "unpredictable: " in ended.out) == (ExitCode.DONE, True)


def test_batches_give_latency_and_replicas_for_the_objective(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    options = ("--arrivals", "700", "--replicas", "2", "--latency", "50ms")
    [reported] = fit(shell, path, BATCHES, *options)["fits"]
    assert reported["per_request_seconds"] == pytest.approx(0.002)
    answer = reported["answer"]
    assert answer["p95_seconds"] < answer["p99_seconds"]
    assert answer["mean_seconds"] <= answer["mean_seconds_max"]
    assert answer["replicas_needed"] > 2
    [reported] = fit(shell, path, BATCHES, "--arrivals", "700")["fits"]
    assert (reported["answer"]["keeps_up"], reported["answer"]["p99_seconds"]) == (False, None)
    [reported] = fit(shell, path, "batch,seconds\n4,0.1\n4,0.2\n", "--arrivals", "1")["fits"]
    assert (reported["known"], reported["next"]["batches"]) == (False, [8])


def test_every_mistake_is_reported_with_its_line_and_column(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text('cores,rate,note\n# measured on Monday\n1,nan,x\n0,3,y\n2,-1,"a,b"\n3,4\n4,1e400,z\nx,2,\n')
    ended = shell("predict", "fit", str(path))
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    places = [line.strip().removeprefix(f"{path}:").split(" ")[0] for line in ended.err.splitlines()[1:]]
    assert places == ["3:3:", "4:1:", "5:3:", "6:3:", "7:3:", "8:1:"]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "is empty"),
        ("cores,rate\n", "no measurements after the header"),
        ("cores,rate,cores\n1,2,3\n", "duplicate column"),
        ("cores,rat\n1,2\n", "match no kind of measurements"),
        ('cores,rate\n1,"2"x\n', "must be a number"),
        ("cores,rate\n1.5,2\n", "must be a whole number"),
    ],
)
def test_a_file_without_valid_measurements_is_rejected(shell: Shell, tmp_path: Path, text: str, reported: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    ended = shell("predict", "fit", str(path))
    assert ended.code == ExitCode.USAGE
    assert reported in ended.err


def test_bad_files_and_options_are_bad_usage(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(RATES)
    (tmp_path / "binary.csv").write_bytes(b"cores,rate\n\xff\xfe,1\n")
    for arguments, reported in (
        ((str(tmp_path / "none.csv"),), "no such file"),
        ((str(tmp_path / "binary.csv"),), "binary.csv:2: not UTF-8 text"),
        ((str(path), "--kind", "rates"), "unknown kind 'rates'"),
        ((str(path), "--kind", "latency"), "column batch, seconds is missing"),
        ((str(path), "--goal-fall", "0.1"), "such as 0.001/1000"),
        ((str(path), "--latency", "soon", "--arrivals", "1"), "--latency must be a duration"),
        ((str(path), "--latency", "1s"), "--latency needs --arrivals"),
        ((str(path), "--plot", "curve.pdf"), "--plot must end in .png, .svg or .html"),
        ((str(path), "--plot", str(tmp_path / "none" / "c.png")), "its parent directory does not exist"),
    ):
        ended = shell("predict", "fit", *arguments)
        assert (ended.code, ended.out) == (ExitCode.USAGE, "")
        assert reported in ended.err


def test_the_curve_is_drawn_on_terminals_and_in_files(shell: Shell, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.csv"
    path.write_text(RATES)
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")):
        target = tmp_path / f"curve.{ending}"
        ended = shell("predict", "fit", str(path), "--plot", str(target))
        assert ended.code == ExitCode.DONE
        assert target.read_bytes().startswith(begin)
        assert "┊ θ 6 (5 to 7)" in ended.out
        assert "●" in ended.out


def test_without_matplotlib_the_error_names_the_extra(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "rates.csv"
    path.write_text(RATES)
    ended = shell("predict", "fit", str(path), "--plot", str(tmp_path / "c.png"))
    assert ended.code == ExitCode.USAGE
    assert "pip install 'cotenant[research]'" in ended.err


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 1e9)), min_size=1, max_size=60, unique_by=lambda p: p[0]),
    st.integers(20, 200),
)
def test_any_points_are_drawn_within_the_width(points: list[tuple[int, float]], width: int) -> None:
    line = sorted(points)
    drawn = list(draw(Chart("t", "x", "y", {"a": line, "b": line[:1]}, points, planned=[9.0]), width))
    plot = [row for row in drawn[2:] if "│" in row or "┤" in row]
    assert len(plot) == 16
    assert max(map(len, plot)) <= max(width, 24 + 16)


@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    with suppress(BadMeasurements):
        read = read_measurements("cores,rate\n" + text, "m.csv")
        assert all(math.isfinite(float(row["rate"])) and int(row["cores"]) >= 1 for row in read.rows)
