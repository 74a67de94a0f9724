"""`cotenant simulate`, as its users see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from cotenant import plugins
from cotenant.cli.main import run
from cotenant.core.model.job_table import Jobs
from cotenant.core.policy.protocols import Order


@dataclass(frozen=True)
class Told:
    exit_code: int
    stdout: str
    stderr: str


def simulate(*arguments: str) -> Told:
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        code = run(["simulate", *arguments])
    return Told(code, stdout.getvalue(), stderr.getvalue())


SAMPLE = ("--trace", "sample", "--cluster", "2x8")


def test_the_output_is_one_object_and_repeatable_except_for_wall_time() -> None:
    told = [json.loads(simulate(*SAMPLE, "--queue", "las", "--json").stdout) for _ in range(2)]
    assert told[0]["finished"] == 260
    assert told[0].pop("wall_seconds") > 0
    assert told[1].pop("wall_seconds") > 0
    assert told[0] == told[1]


def test_a_table_is_printed_for_people() -> None:
    result = simulate("--trace", "sample", "--cluster", "1x8")
    assert result.exit_code == 0
    assert "258 of 260" in result.stdout
    assert "2 jobs: 16 replicas" in result.stdout


def test_options_reach_their_policies() -> None:
    strict, backfill = (
        json.loads(simulate(*SAMPLE, "--option", f"queue.mode={mode}", "--json").stdout)
        for mode in ("strict", "backfill")
    )
    assert backfill["avg_jct_seconds"] < strict["avg_jct_seconds"]
    assert backfill["options"] == {"queue": {"mode": "backfill"}}


def test_missing_cores_can_be_left_to_the_allocator() -> None:
    told = simulate(*SAMPLE, "--allocator", "proportional", "--option", "simulator.cores=auto", "--json").stdout
    figures = json.loads(told)
    assert figures["cpu_utilisation"] == pytest.approx(figures["gpu_utilisation"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--queue", "fiffo"), "there is no queue policy 'fiffo'; did you mean fifo?"),
        (("--placement", "konsolidate"), "did you mean consolidate?"),
        (("--allocator", "request"), "did you mean requested?"),
        (("--predictor", "oracel"), "did you mean oracle"),
        (("--predictor", "histori"), "did you mean history"),
        (("--contention", "nobody"), "no contention policy 'nobody'"),
        (("--option", "contention.x=1"), "contention.x: unknown option; none has none"),
        (("--option", "queue.mode=fast"), "queue.mode: must be one of strict, backfill, not 'fast'"),
        (("--option", "queue.mod=strict"), "queue.mod: is not an option; did you mean mode?"),
        (("--option", "queu.mode=strict"), "queu: unknown group; did you mean queue?"),
        (("--option", "mode"), "mode: must be written group.key=value"),
        (("--option", "predictor.x=1"), "predictor.x: unknown option; oracle has none"),
        (("--option", "simulator.preemption_cost_seconds=-1"), "must be 0 or more, not -1"),
        (("--predictor", "noisy-oracle", "--option", "predictor.predictable=2"), "must be from 0 to 1, not 2"),
        (("--format", "itpp"), "unknown trace format 'itpp'; did you mean itp?"),
        (("--format", "philly"), "it looks like a header of format itp"),
        (("--cluster", "2y8"), "cluster '2y8' is neither NxG[xC]"),
        (("--trace", "/nowhere.csv"), "/nowhere.csv cannot be read: No such file or directory"),
        (("--seed", "-1"), "-1 is not in the range x>=0"),
    ],
)
def test_invalid_input_exits_with_2_and_a_sentence(arguments: tuple[str, ...], told: str) -> None:
    result = simulate(*SAMPLE, *arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_skipped_rows_are_listed_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("job_id,submission_time,duration,num_gpu\na,9,5,1\nz,5,5,1\n" + "b,0,x,1\n" * 12)
    assert simulate("--trace", str(file), "--cluster", "1x8").exit_code == 2
    result = simulate("--trace", str(file), "--cluster", "1x8", "--skip-bad-rows", "--json")
    assert result.exit_code == 0
    assert "note: 1 rows were submitted before the row above them" in result.stderr
    assert result.stderr.count("skipped: ") == 11
    assert "skipped: 2 more rows" in result.stderr
    assert json.loads(result.stdout)["skipped_rows"]["count"] == 12


class Raises:
    name, api_version, preemptive, strict, running_first = "fifo", 1, False, True, False

    def order(self, jobs: object, now: float) -> None:
        raise RuntimeError("out of order")


def test_a_policy_that_fails_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.plugins.load", lambda *_: Raises())
    result = simulate(*SAMPLE)
    assert result.exit_code == 1
    assert "allocation policy 'fifo' failed" in result.stderr


class Interrupting:
    """First in, first out, until Ctrl-C."""

    name, api_version, preemptive, strict, running_first = "fifo", 1, False, True, False
    asked = 0

    def order(self, jobs: Jobs, now: float) -> Order:
        self.asked += 1
        if self.asked == 50:
            os.kill(os.getpid(), signal.SIGINT)
        return Order(np.zeros(len(jobs), dtype=np.int64), jobs.arrival_seconds.copy())


def test_an_interrupt_stops_it_cleanly_with_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    find = plugins.load

    def load(group: str, name: str, options: Mapping[str, str]) -> object:
        return Interrupting() if group == "cotenant.queue_policies" else find(group, name, options)

    monkeypatch.setattr("cotenant.simulator.run.plugins.load", load)
    monkeypatch.setattr("cotenant.simulator.run.WATCH_SECONDS", 0.0)
    handler = signal.getsignal(signal.SIGINT)
    result = simulate(*SAMPLE, "--json")
    assert result.exit_code == 130
    assert "of simulated time: " in result.stderr
    assert "Traceback" not in result.stderr
    figures = json.loads(result.stdout)
    assert figures["complete"] is False
    assert 0 < figures["finished"] < figures["jobs"] < 260
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_command_line_loads_nothing_heavy_before_it_simulates() -> None:
    heavy = "{'numpy', 'cotenant.simulator', 'rich.progress'}"
    code = f"import sys, cotenant.cli.research.simulate; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
