from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from tests.support.paths import ROOT

KEYS = {"name", "value", "unit", "reference", "reference_name", "ratio", "bar", "holds"}


def benchmark(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark with this body of `measure`."""
    script = f"from benchmarks.harness import Row, main\n\ndef measure(quick):\n{textwrap.indent(body, '    ')}\n\n"
    return subprocess.run(
        [sys.executable, "-c", f"{script}main(measure, 'a test')", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


HOLDS = "return [Row('commits', 50.0, '1/s', 200.0, 'raw commits', 'at least 10/s', True)]"
FAILS = "return [Row('commits', 5.0, '1/s', 200.0, 'raw commits', 'at least 10/s', False)]"
NO_BAR = "return [Row('commits', 5.0, '1/s')]"


def test_json_output_is_an_array_of_rows_with_ratios() -> None:
    done = benchmark(HOLDS, "--json")
    (row,) = json.loads(done.stdout)
    assert set(row) == KEYS
    assert (row["value"], row["ratio"], row["holds"]) == (50.0, 0.25, True)


@pytest.mark.parametrize(("body", "status"), [(HOLDS, 0), (NO_BAR, 0), (FAILS, 1)])
def test_the_exit_status_is_1_if_a_bar_is_missed(body: str, status: int) -> None:
    assert benchmark(body).returncode == status


def test_the_table_shows_the_figure_its_reference_and_the_bar() -> None:
    shown = benchmark(FAILS).stdout
    for word in ("commits", "raw commits", "0.025", "at least 10/s", "no"):
        assert word in shown


def test_quick_is_passed_to_the_benchmark() -> None:
    body = "return [Row(f'quick={quick}', 1.0, '')]"
    assert json.loads(benchmark(body, "--json", "--quick").stdout)[0]["name"] == "quick=True"
    assert json.loads(benchmark(body, "--json").stdout)[0]["name"] == "quick=False"
