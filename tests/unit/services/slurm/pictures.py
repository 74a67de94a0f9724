"""Pictures of Slurm clusters: as recorded from a real Slurm, and made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotenant.services.slurm.reader import read
from cotenant.services.slurm.records import Picture, SlurmJob, SlurmNode

SAMPLES = Path(__file__).parent / "samples"
NOW = 1_795_839_360.0  # some seconds after the samples were recorded


def sample(name: str) -> str:
    """Return a recorded answer: of `squeue` or `sinfo`."""
    return (SAMPLES / f"{name}-22.05.json").read_text()


def recorded() -> Picture:
    """Return the recorded cluster."""
    jobs, nodes = read(sample("squeue")), read(sample("sinfo"))
    return Picture(NOW, {node.name: node for node in nodes.nodes}, {job.id: job for job in jobs.jobs}, jobs.version)


def picture(nodes: Sequence[SlurmNode], *jobs: SlurmJob) -> Picture:
    """Return a cluster of these nodes and jobs."""
    return Picture(NOW, {node.name: node for node in nodes}, {job.id: job for job in jobs})


def newer(value: Any) -> Any:
    """Return an answer as newer versions write it: numbers with flags, states as lists."""
    if isinstance(value, dict):
        return {
            name: [one]
            if name in ("job_state", "shared")
            else {"set": True, "infinite": False, "number": one}
            if name in ("array_job_id", "priority", "time_limit", "cpus", "node_count", "submit_time", "start_time")
            else {"set": False, "infinite": False, "number": 0}
            if name == "array_task_id" and one is None
            else newer(one)
            for name, one in value.items()
        }
    return [newer(one) for one in value] if isinstance(value, list) else value


def newer_text(name: str) -> str:
    """Return a recorded answer in the form of newer versions."""
    return json.dumps(newer(json.loads(sample(name))))
