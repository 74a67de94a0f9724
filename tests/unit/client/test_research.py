"""Simulations from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cotenant
from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import Order
from cotenant.simulator import simulate as plain_simulate


def test_a_simulation_has_the_figures_of_the_simulator() -> None:
    trace = cotenant.load_trace("sample")
    ours = cotenant.simulate(trace, "2x8", queue="las", options={"simulator.preemption_cost_seconds": 30})
    theirs = plain_simulate("sample", "2x8", queue="las", options={"simulator": {"preemption_cost_seconds": "30"}})
    assert ours.result.avg_jct_seconds == theirs.avg_jct_seconds
    assert ours.result.outcomes == theirs.outcomes
    assert isinstance(trace, cotenant.Trace)
    rows = ours.rows()
    assert len(rows) == ours.figures["jobs"] == len(trace)
    assert rows[0]["jct_seconds"] == theirs.outcomes[0].jct_seconds


def test_arms_are_compared() -> None:
    comparison = cotenant.compare("sample", "2x8", ["fifo", "srsf"])
    assert list(comparison.figures) == ["fifo", "srsf"]
    assert comparison.figures["srsf"]["avg_jct_seconds"] < comparison.figures["fifo"]["avg_jct_seconds"]
    assert [row["arm"] for row in comparison.rows()] == ["fifo", "srsf"]


class NewestFirst:
    """A policy that is not installed."""

    name = "newest-first"
    api_version = 1
    preemptive = strict = running_first = False

    def order(self, jobs: Jobs, now: float) -> Order:
        return Order(level=np.zeros(len(jobs), dtype=np.int64), score=-jobs.arrival_seconds)


def test_a_policy_need_not_be_installed() -> None:
    alone = cotenant.simulate("sample", "2x8", queue=NewestFirst())
    assert alone.figures["policies"]["queue"] == "newest-first"
    comparison = cotenant.compare("sample", "2x8", ["fifo", NewestFirst()])
    assert list(comparison.figures) == ["fifo", "newest-first"]
    assert comparison.figures["newest-first"]["avg_jct_seconds"] == alone.result.avg_jct_seconds


@pytest.mark.deep
def test_results_are_plotted_and_shown_as_tables(tmp_path: Path) -> None:
    comparison = cotenant.compare("sample", "2x8", ["fifo", "srsf"])
    alone = cotenant.simulate("sample", "2x8")
    for made in (
        *(comparison.plot_averages(), comparison.plot_distributions(), comparison.plot_over_time()),
        *(comparison.plot_waits(), comparison.plot_by_size(), alone.plot_distributions(), alone.plot_over_time()),
    ):
        assert made.title
        assert made.figure.axes
    plot = comparison.plot_averages()
    assert plot._repr_png_().startswith(b"\x89PNG")
    plot.save(tmp_path / "averages.svg")
    assert "<svg" in (tmp_path / "averages.svg").read_text()
    assert "<td>srsf</td>" in comparison._repr_html_()
    assert alone._repr_html_().count("<tr>") == 2


def test_bad_fields_are_all_named() -> None:
    with pytest.raises(cotenant.InvalidArgument) as caught:
        cotenant.simulate("sample", "2x8", quue="las", options={"mode": 1})  # type: ignore[call-arg]  # what is tested
    assert [bad.field for bad in caught.value.fields] == ["quue", "options['mode']"]


def test_a_frame_needs_one_of_two_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    done = cotenant.simulate("sample", "2x8")
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(cotenant.CotenantError, match="pip install pandas"):
        done.to_frame()
    monkeypatch.setitem(sys.modules, "polars", SimpleNamespace(DataFrame=len))
    assert done.to_frame() == 260


def test_without_the_extra_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['numpy'] = None\nimport cotenant\n"
        "try: cotenant.simulate\nexcept cotenant.CotenantError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "simulations need numpy\nhint: pip install 'cotenant[research]'\n"
