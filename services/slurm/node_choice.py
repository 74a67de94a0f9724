"""On which nodes pending jobs of Slurm should start, as lists of excluded nodes. Pure.

Slurm has no soft wish for nodes: `ReqNodeList` is a requirement, and so is `ExcNodeList`. A list of excluded nodes is
made soft here by what it leaves: only nodes that have room for the job now are excluded, and as many that have room as
the job needs are left. So the job can start at once where we want it, and on nodes that are full now it may start as
before. When that no longer holds, the list is withdrawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.services.slurm.placement_view import ruled_out
from cotenant.services.slurm.planning import BACKFILL, Scene, view_of
from cotenant.services.slurm.records import Picture, SlurmJob
from cotenant.services.slurm.site_order import orderable

PLANNED_MAX = 200  # jobs, in Slurm's order
EXCLUDED_MAX = 500  # nodes of one job
LISTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The nodes on which a job should start, and those that are excluded so that it does."""

    job: str
    nodes: tuple[str, ...]
    excluded: tuple[str, ...]


def choosable(job: SlurmJob) -> bool:
    """Return whether a job's nodes are ours to choose: its user names none, and it is no part of another job."""
    return orderable(job) and job.task is None and not job.required_nodes and bool(job.nodes_min)


def chosen_nodes(scene: Scene, policy: PlacementPolicy, rng: np.random.Generator) -> dict[str, NodeChoice]:
    """Return the choices of the pending jobs that a cycle of ours would start now, by their ids.

    The lists that jobs already have are ours or their users': callers pass a scene without ours.
    """
    ready = [job for job in scene.waiting if job.id not in scene.reasons][:PLANNED_MAX]
    gangs = [scene.gang(job) for job in ready]
    plan = cycle.place(gangs, scene.ledger, policy, rng, cluster_view=view_of(scene), reserving=BACKFILL)
    by_number = {number: name for name, number in scene.ledger.numbers.items()}
    found = {}
    for start in plan.starts:
        job = scene.picture.jobs[start.gang.job_id]
        if not choosable(job) or job.excluded_nodes:
            continue
        names = sorted({by_number[holding.node] for holding in start.holdings})
        closed = ruled_out(job, scene.specs[job.id], scene.picture, scene.ledger)
        roomy = [name for name in sorted(scene.picture.nodes) if name not in closed]
        excluded = [name for name in roomy if name not in names]
        left = len(roomy) - len(excluded)
        if excluded and len(excluded) <= EXCLUDED_MAX and left == len(names) >= job.nodes_min:
            found[job.id] = NodeChoice(job.id, tuple(names), tuple(excluded))
    return found


def without_lists(picture: Picture, ours: Mapping[str, tuple[str, ...]]) -> Picture:
    """Return a picture in which jobs lack the lists of excluded nodes that are ours."""
    jobs = {
        job.id: replace(job, excluded_nodes=()) if job.id in ours and {*job.excluded_nodes} == {*ours[job.id]} else job
        for job in picture.jobs.values()
    }
    return replace(picture, jobs=jobs)


def changes(
    picture: Picture, ours: Mapping[str, tuple[str, ...]], wanted: Mapping[str, NodeChoice]
) -> dict[str, tuple[str, ...]]:
    """Return the lists to set, those to withdraw (empty ones) first. A list that is no longer ours is left alone."""
    withdrawn = {
        job_id: ()
        for job_id, excluded in ours.items()
        if job_id not in wanted and is_ours(picture.jobs.get(job_id), excluded)
    }
    new = {job_id: one.excluded for job_id, one in wanted.items() if ours.get(job_id) != one.excluded}
    return withdrawn | new


def is_ours(job: SlurmJob | None, excluded: tuple[str, ...]) -> bool:
    """Return whether a pending job still has the list that was set."""
    return job is not None and job.waits and {*job.excluded_nodes} == {*excluded}


def dump(lists: Mapping[str, tuple[str, ...]]) -> str:
    """Return lists as JSON."""
    return json.dumps({"version": 1, "excluded": {job: list(nodes) for job, nodes in lists.items()}})


def load(text: str | bytes) -> dict[str, tuple[str, ...]]:
    """Return dumped lists, without what in them is invalid.

    Raises:
        ValueError: it is no dump.
    """
    try:
        dumped = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(dumped, dict) or dumped.get("version") != 1 or not isinstance(dumped.get("excluded"), dict):
        raise ValueError("it has no version or no lists")
    return {
        job: tuple(nodes)
        for job, nodes in list(dumped["excluded"].items())[:LISTS_MAX]
        if isinstance(nodes, list) and nodes and all(isinstance(name, str) for name in nodes)
    }
