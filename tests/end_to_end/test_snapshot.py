"""A snapshot of a real mesh is simulated: waiting jobs wait for the same reasons."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.end_to_end.commands import Cli
from tests.end_to_end.waiting import until

SLEEP = ("--", sys.executable, "-c", "import time; time.sleep(600)")


def test_a_snapshot_continues_from_the_meshs_state_and_holds_no_secrets(cli: Cli, tmp_path: Path) -> None:
    asked = ("--cpus", "1", "--tenant", "vision", "--env", "PASSWORD=tell-nobody", "--label", "token=tell-nobody")
    runs = cli("submit", "--gpus", "1", *asked, *SLEEP).out.split()[0]
    gpus = sum(node["gpus"] for node in cli.json("nodes"))
    waits = cli("submit", "--gpus", str(gpus), *asked, *SLEEP).out.split()[0]
    try:
        until(lambda: cli.json("show", runs)["phase"] == "running", "running job")
        until(lambda: cli.json("explain", waits)["job"]["reason"]["code"] == "CAPACITY", "reason to wait")
        path = tmp_path / "taken.json"
        assert cli.json("snapshot", "-o", path)["running"] == 1
        text = path.read_text()
        assert "tell-nobody" not in text
        assert "time.sleep" not in text
        taken = json.loads(text)
        assert [job["refusal"].split(":")[0] for job in taken["jobs"]] == ["", "CAPACITY"]
        events = tmp_path / "events.jsonl"
        simulated = cli.json("simulate", "--from-snapshot", path, "--events", events)
        assert simulated["finished"] == 2
        reported = [json.loads(line) for line in events.read_text().splitlines()]
        first = next(event for event in reported if event["kind"] == "waiting")
        shapes = {event["job_id"]: event["shape"] for event in reported if event["kind"] == "submitted"}
        assert first["code"] == "CAPACITY"
        assert waits == first.get("job_id", waits)  # reasons are told of a job, or of all that need the same
        assert shapes[waits] == first.get("shape", shapes[waits])
        assert "tenant-0001" in cli("snapshot", "--anonymous", "-o", "-").out
        assert "vision" not in cli("snapshot", "--anonymous", "-o", "-").out
        assert cli("snapshot", "-o", tmp_path / "no" / "where.json", code=2).error
    finally:
        cli("cancel", runs, waits)
