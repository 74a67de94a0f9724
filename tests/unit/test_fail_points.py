"""Fail points: each exists in the code, and kills or stops a process there only if armed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from cotenant import fail_points

REACH_TWICE = """
import asyncio, os
from cotenant import fail_points
async def main():
    fail_points.arm(os.environ[fail_points.VARIABLE])
    for turn in range(3):
        await fail_points.reach("queue.committed")
        print(turn, flush=True)
asyncio.run(main())
"""


def start(armed: str) -> subprocess.Popen[str]:
    environment = os.environ | {fail_points.VARIABLE: armed}
    return subprocess.Popen([sys.executable, "-c", REACH_TWICE], env=environment, stdout=subprocess.PIPE, text=True)


def test_each_point_is_at_one_place_in_the_code_and_none_is_unknown() -> None:
    sources = [path for folder in ("services", "node_agent", "src") for path in (ROOT / folder).rglob("*.py")]
    found = Counter(
        point for path in sources for point in re.findall(r'fail_points\.reach\("(.*?)"\)', path.read_text())
    )
    assert found == Counter(dict.fromkeys(fail_points.POINTS, 1))


@pytest.mark.parametrize(
    ("armed", "printed"),
    [("queue.committed=kill", ""), ("queue.committed=kill@3", "0\n1\n"), ("placement.loading=kill", "0\n1\n2\n")],
)
def test_a_process_is_killed_where_it_is_armed(armed: str, printed: str) -> None:
    process = start(armed)
    assert process.communicate(timeout=30)[0] == printed
    assert process.returncode == (0 if armed.startswith("placement") else -signal.SIGKILL)


def test_a_process_is_halted_and_goes_on() -> None:
    process = start("queue.committed=stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == "0\n1\n2\n"


def test_a_directory_arms_the_first_process_that_reaches_a_point(tmp_path: Path) -> None:
    point = tmp_path / "queue.committed"
    point.write_text("kill@2")
    first = start(str(tmp_path))
    assert first.communicate(timeout=30)[0] == "0\n"
    assert first.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [f"{point.name}.{first.pid}"]
    second = start(str(tmp_path))
    assert second.communicate(timeout=30)[0] == "0\n1\n2\n"
    point.write_text("nonsense")
    assert start(str(tmp_path)).communicate(timeout=30)[0] == "0\n1\n2\n"


def test_a_directory_counts_how_often_each_point_was_reached(tmp_path: Path) -> None:
    passed = tmp_path / fail_points.PASSED
    passed.mkdir()
    assert start(str(tmp_path)).communicate(timeout=30)[0] == "0\n1\n2\n"
    (tmp_path / "queue.committed").write_text("kill@2")
    start(str(tmp_path)).communicate(timeout=30)
    assert {path.name: path.stat().st_size for path in passed.iterdir()} == {"queue.committed": 3 + 2}


def test_invalid_arms_are_rejected_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"no fail point 'nowhere'; 'queue.committed=burn' .* 'election.won=kill@0'"):
        fail_points.arm("nowhere=kill, queue.committed=burn,election.won=kill@0")


def test_a_service_reports_an_invalid_variable() -> None:
    environment = os.environ | {fail_points.VARIABLE: "nowhere=kill"}
    command = [str(Path(sys.executable).with_name("cotenant")), "serve", "placement"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "COTENANT_FAIL_POINTS: there is no fail point 'nowhere'" in done.stderr
    assert "Traceback" not in done.stderr


async def test_listeners_are_called_for_each_point_until_they_end() -> None:
    heard = []

    async def hear(point: str) -> None:
        await asyncio.sleep(0)
        heard.append(point)

    with fail_points.armed(hear):
        await fail_points.reach("queue.planned")
    await fail_points.reach("queue.planned")
    assert heard == ["queue.planned"]
