"""A placement service paused for longer than the node timeout gives up no attempt that was there all along."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.end_to_end.meshes import SERVICES, Separate
from tests.end_to_end.scripts import Counter
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

LOST_AFTER_SECONDS = 2.0


def test_a_paused_placement_service_marks_no_node_lost(tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    settings.write_text(f"heartbeat_seconds = 0.5\nlost_after_seconds = {LOST_AFTER_SECONDS}\n")
    mesh = Separate(tmp_path)
    mesh.flags["placement"] = ["--config", str(settings)]
    mesh.start(*SERVICES)
    try:
        holder = Counter(tmp_path, "holder")
        job_id = mesh.cli.submit("--gpus", "1", "--cpus", "1", *holder.command)
        mesh.client.wait_for(job_id, Phase.RUNNING)
        placement = mesh.processes["placement"].pid
        os.kill(placement, signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: time.monotonic() > began + 2 * LOST_AFTER_SECONDS, "end of the pause")
        os.kill(placement, signal.SIGCONT)
        holder.finish()
        assert mesh.client.wait_for(job_id, Phase.SUCCEEDED).attempt.number == 1
        holder.assert_one_life()
        log = mesh.log("placement").read_text()
        assert "process_stalled" in log
        assert "attempt_part_given_up" not in log
    finally:
        mesh.close()
