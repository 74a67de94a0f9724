"""Arrays and dependencies with real processes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
from tests.end_to_end.commands import Cli
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import Phase

ONE_CORE = ("--cpus", "1")
# Says when it began and when it ended, and lets the one whose index is named fail.
SCRIPT = """
import os, sys, time
name = "_".join(os.environ["COTENANT_ARRAY_" + part] for part in ("INDEX", "COUNT", "ID"))
began = time.time()
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
time.sleep(0.1)
with open(sys.argv[2], "a") as file: file.write(f"{began} +1\\n{time.time()} -1\\n")
print("I am", name)
sys.exit(int(os.environ["COTENANT_ARRAY_INDEX"] == sys.argv[3]))
"""


def stand(mesh: Mesh, array_id: str, words: str) -> None:
    """Wait until exactly this many jobs of an array are in each of these phases."""

    def counted() -> dict[str, int]:
        jobs = [job for job in mesh.client.jobs() if job.spec.array_task.array_id == array_id]
        return Counter(PHASES.names[job.phase] for job in jobs)

    wanted = {phase: int(count) for count, phase in (part.split() for part in words.split(", "))}
    until(lambda: counted() == wanted, words)


@pytest.mark.deep
def test_an_array_obeys_its_limit_and_can_be_waited_for(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    go, reported = tmp_path / "go", tmp_path / "told"
    script = (sys.executable, "-c", SCRIPT, str(go), str(reported), "none")
    array_id = cli.submit("--name", "sweep", "--array", "0-5%2", *ONE_CORE, "--", *script)
    after = cli.submit("--after-ok", array_id[-6:], *ONE_CORE, "--", "echo", "all done")
    stand(mesh, array_id, "4 queued, 2 running")
    assert "ARRAY_LIMIT" in cli("explain", f"{array_id[-6:]}_5").out
    assert f"waits for 1 job to succeed: {array_id} (4 queued, 2 running)" in cli("explain", after).out
    rows = cli("jobs").out.splitlines()
    [row] = [line for line in rows if line.startswith(array_id)]
    assert re.search(r"sweep +running +6 × 0 +6 × 1 .* 4 queued, 2 running", row)
    assert len(cli("jobs", "--array", array_id).out.splitlines()) == 7
    go.touch()
    cli("submit", "--after", after, "--wait", *ONE_CORE, "--", "true")
    assert cli("logs", f"{array_id}_3").out == f"I am 3_6_{array_id}\n"
    assert all(f"I am {index}_6_{array_id}" in cli("logs", array_id).out for index in range(6))
    assert cli("logs", after).out == "all done\n"
    events = sorted(line.split() for line in reported.read_text().splitlines())
    at_once = list(accumulate(int(step) for _, step in events))
    assert len(at_once) == 12
    assert max(at_once) == 2
    assert "6 succeeded" in cli("show", array_id).out
    assert "array: 0-5%2" in cli("show", "--file", array_id).out


def test_a_failed_task_fails_the_wait_and_cancels_dependents(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    go, reported = tmp_path / "go", tmp_path / "told"
    go.touch()
    script = f"{sys.executable} -c '{SCRIPT}' {go} {reported} 1"
    jobs = tmp_path / "jobs.yaml"
    script_lines = "\n".join(f"  {line}" for line in script.splitlines())
    jobs.write_text(
        "name: evaluate\nafter_ok: sweep\ncpus: 1\ncommand: [echo, never]\n---\n"
        f"name: sweep\narray: 0,1\ncpus: 1\ncommand: |\n{script_lines}\n"
    )
    ended = cli("submit", "--wait", jobs, code=1)
    assert "2 jobs did not succeed" in ended.err
    assert re.search(r"_1 failed: ", ended.err)
    (evaluate,) = [job for job in cli.json("jobs", "--all") if job["name"] == "evaluate"]
    assert evaluate["phase"] == "cancelled"
    assert evaluate["attempt"] is None
    assert "depends on the success of array " in evaluate["phase_reason"]


def test_an_array_is_cancelled_as_one_and_outlives_a_kill(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    array_id = cli.submit("--array", "1-4%1", *ONE_CORE, "--", "sleep", "600")
    after = cli.submit("--after", array_id, *ONE_CORE, "--", "true")
    stand(mesh, array_id, "3 queued, 1 running")
    mesh.kill()
    mesh.start()
    stand(mesh, array_id, "3 queued, 1 running")
    taken = cli("snapshot", "-o", tmp_path / "taken.json").err
    assert "omitted jobs that wait for other jobs: 1\n" in taken
    assert "jobs at their array's limit, which simulations ignore: 3\n" in taken
    assert array_id in cli("suspend", array_id).out
    stand(mesh, array_id, "4 suspended")
    cli("resume", array_id)
    stand(mesh, array_id, "3 queued, 1 running")
    assert array_id in cli("cancel", array_id).out
    stand(mesh, array_id, "4 cancelled")
    mesh.client.wait_for(after, Phase.SUCCEEDED)
