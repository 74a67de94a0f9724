"""`cotenant predict fit`: measurements in, what they tell out."""

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
    told = (f"{k},{1 / (0.002 * k + 0.5) + 0.3 + chance.gauss(0, noise):.5f}\n" for k in range(10, last, 10))
    return "step,loss\n" + "".join(told)


def fit(shell: Shell, path: Path, text: str, *options: str) -> Any:
    path.write_text(text)
    ended = shell("predict", "fit", str(path), "--json", *options)
    assert ended.code == ExitCode.DONE, ended.err
    return ended.json


def test_the_header_tells_the_kind(shell: Shell, tmp_path: Path) -> None:
    texts = {"cores": RATES, "scaling": SCALING, "parameter-server": TEAMS, "loss": losses(), "latency": BATCHES}
    assert set(texts) == set(KINDS)
    for kind, text in texts.items():
        assert fit(shell, tmp_path / "m.csv", text)["kind"] == kind


def test_theta_and_rates_are_those_of_the_predictors_own_curve(shell: Shell, tmp_path: Path) -> None:
    [told] = fit(shell, tmp_path / "rates.csv", RATES)["fits"]
    curve = core_curve.fit(
        [core_curve.Point(1, 10.0), core_curve.Point(2, 20.0), core_curve.Point(4, 39.0), core_curve.Point(16, 60.0)]
    )
    assert (told["theta"]["cores"], told["theta"]["low"], told["theta"]["high"]) == (6, *curve.interval)
    assert told["theta"]["known"]
    assert {one["cores"]: one["rate_per_second"] for one in told["rates"]} == {
        cores: curve.rate(cores) for cores in core_curve.ladder(16)
    }
    assert all(one["p10"] < one["rate_per_second"] < one["p90"] for one in told["rates"])


def test_a_rate_that_still_rises_leaves_theta_unknown(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    [told] = fit(shell, path, "cores,rate\n1,10\n2,20\n4,40\n", "--cores-max", "16")["fits"]
    assert not told["theta"]["known"]
    assert told["next"]["cores"][0] == 16
    assert "was not seen to level off by 4 cores" in shell("predict", "fit", str(path)).out


def test_models_and_phases_have_fits_of_their_own(shell: Shell, tmp_path: Path) -> None:
    text = "model,phase,cores,rate,note\nres18,,1,10,x\nres18,,8,60,x\nres18,validation,1,30,y\nvgg,,1,3,z\n"
    told = fit(shell, tmp_path / "m.csv", text)
    assert [(one["model"], one["phase"]) for one in told["fits"]] == [
        ("res18", None),
        ("res18", "validation"),
        ("vgg", None),
    ]
    assert told["columns_ignored"] == ["note"]


def test_placements_beyond_those_measured_are_told_with_less_confidence(shell: Shell, tmp_path: Path) -> None:
    [told] = fit(shell, tmp_path / "m.csv", SCALING)["fits"]
    rates = {(one["gpus"], one["nodes"]): one for one in told["rates"]}
    assert rates[4, 2]["rate_per_second"] == pytest.approx(1 / 1.4, rel=0.02)
    assert rates[8, 4]["confidence"] < rates[2, 2]["confidence"]
    assert told["next"]["placements"] == []


def test_what_genie_learns_from_is_to_be_measured_first(shell: Shell, tmp_path: Path) -> None:
    [told] = fit(shell, tmp_path / "m.csv", "gpus,nodes,rate\n2,1,5\n")["fits"]
    assert told["next"]["placements"] == [{"gpus": 1, "nodes": 1}, {"gpus": 2, "nodes": 2}]


def test_four_teams_are_too_few_and_it_says_so(shell: Shell, tmp_path: Path) -> None:
    few = "".join(TEAMS.splitlines(keepends=True)[:5])
    [told] = fit(shell, tmp_path / "m.csv", few)["fits"]
    assert (told["known"], told["why_not"]) == (False, "4 teams measured, of 5 that are needed")
    [told] = fit(shell, tmp_path / "m.csv", TEAMS)["fits"]
    four = next(one for one in told["rates"] if (one["workers"], one["servers"]) == (4, 4))
    assert four["rate_per_second"] == pytest.approx(1 / 1.7, rel=0.05)


def test_a_loss_curve_tells_when_its_goal_is_reached_and_how_long_that_takes(shell: Shell, tmp_path: Path) -> None:
    [told] = fit(shell, tmp_path / "l.csv", losses(), "--goal-loss", "0.45", "--rate", "10")["fits"]
    truth = (1 / 0.15 - 0.5) / 0.002
    assert told["predictable"]
    assert told["goal_step"] == pytest.approx(truth, rel=0.1)
    assert told["remaining_seconds"] == pytest.approx((told["goal_step"] - 1990) / 10)
    assert told["remaining_p10_seconds"] < told["remaining_seconds"] < told["remaining_p90_seconds"]


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (losses(), (), "no goal was named"),
        ("step,loss\n1,0.5\n2,0.4\n", ("--goal-loss", "0.1"), "too few"),
        ("step,loss\n" + "".join(f"{k},{0.1 * k}\n" for k in range(1, 50)), ("--goal-loss", "0.1"), "does not fall"),
        ("step,loss\n" + "".join(f"{k},nan\n" for k in range(1, 50)), ("--goal-loss", "0.1"), "no finite number"),
        (losses(), ("--goal-loss", "0.1"), "above its goal"),
    ],
)
def test_an_unpredictable_loss_curve_is_an_answer(
    shell: Shell, tmp_path: Path, text: str, options: tuple[str, ...], why: str
) -> None:
    [told] = fit(shell, tmp_path / "l.csv", text, *options)["fits"]
    assert not told["predictable"]
    assert why in told["why_not"]
    ended = shell("predict", "fit", str(tmp_path / "l.csv"), *options)
    assert (ended.code, "unpredictable: " in ended.out) == (ExitCode.DONE, True)


def test_batches_tell_latency_and_the_replicas_that_keep_a_promise(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    options = ("--arrivals", "700", "--replicas", "2", "--latency", "50ms")
    [told] = fit(shell, path, BATCHES, *options)["fits"]
    assert told["per_request_seconds"] == pytest.approx(0.002)
    answer = told["answer"]
    assert answer["p95_seconds"] < answer["p99_seconds"]
    assert answer["mean_seconds"] <= answer["mean_seconds_max"]
    assert answer["replicas_needed"] > 2
    [told] = fit(shell, path, BATCHES, "--arrivals", "700")["fits"]
    assert (told["answer"]["keeps_up"], told["answer"]["p99_seconds"]) == (False, None)
    [told] = fit(shell, path, "batch,seconds\n4,0.1\n4,0.2\n", "--arrivals", "1")["fits"]
    assert (told["known"], told["next"]["batches"]) == (False, [8])


def test_every_mistake_is_named_with_its_line_and_column(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text('cores,rate,note\n# measured on Monday\n1,nan,x\n0,3,y\n2,-1,"a,b"\n3,4\n4,1e400,z\nx,2,\n')
    ended = shell("predict", "fit", str(path))
    assert (ended.code, ended.out) == (ExitCode.USAGE, "")
    places = [line.strip().removeprefix(f"{path}:").split(" ")[0] for line in ended.err.splitlines()[1:]]
    assert places == ["3:3:", "4:1:", "5:3:", "6:3:", "7:3:", "8:1:"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has nothing in it"),
        ("cores,rate\n", "is followed by no measurement"),
        ("cores,rate,cores\n1,2,3\n", "stands twice"),
        ("cores,rat\n1,2\n", "of no kind of measurements"),
        ('cores,rate\n1,"2"x\n', "must be a number"),
        ("cores,rate\n1.5,2\n", "must be a whole number"),
    ],
)
def test_a_file_that_cannot_be_measurements_is_told_so(shell: Shell, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    ended = shell("predict", "fit", str(path))
    assert ended.code == ExitCode.USAGE
    assert told in ended.err


def test_bad_files_and_options_are_bad_usage(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(RATES)
    (tmp_path / "binary.csv").write_bytes(b"cores,rate\n\xff\xfe,1\n")
    for arguments, told in (
        ((str(tmp_path / "none.csv"),), "no such file"),
        ((str(tmp_path / "binary.csv"),), "binary.csv:2: is no UTF-8 text"),
        ((str(path), "--kind", "rates"), "there is no kind 'rates'"),
        ((str(path), "--kind", "latency"), "has no column batch, seconds"),
        ((str(path), "--goal-fall", "0.1"), "as in 0.001/1000"),
        ((str(path), "--latency", "soon", "--arrivals", "1"), "--latency must be a length of time"),
        ((str(path), "--latency", "1s"), "--latency needs --arrivals"),
        ((str(path), "--plot", "curve.pdf"), "the ending tells the format"),
        ((str(path), "--plot", str(tmp_path / "none" / "c.png")), "its directory does not exist"),
    ):
        ended = shell("predict", "fit", *arguments)
        assert (ended.code, ended.out) == (ExitCode.USAGE, "")
        assert told in ended.err


def test_the_curve_is_drawn_for_people_and_for_papers(shell: Shell, tmp_path: Path) -> None:
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


def test_without_matplotlib_it_says_what_to_install(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "rates.csv"
    path.write_text(RATES)
    ended = shell("predict", "fit", str(path), "--plot", str(tmp_path / "c.png"))
    assert ended.code == ExitCode.FAILED
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
def test_no_text_breaks_the_reader(text: str) -> None:
    with suppress(BadMeasurements):
        read = read_measurements("cores,rate\n" + text, "m.csv")
        assert all(math.isfinite(float(row["rate"])) and int(row["cores"]) >= 1 for row in read.rows)
