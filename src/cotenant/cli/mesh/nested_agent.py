"""An agent in a job of another system: whether it is in one, what it offers there, and until when."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cotenant.cli.outcome import note, usage_error
from cotenant.cli.units import parse_seconds, parse_time, write_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cotenant.node_agent.probes.outer_job import Nesting, OuterJob

DRAIN_BEFORE = "5m"
DRAIN_SHARE_MAX = 0.5  # of a short time
OPTIONS = "until", "duration", "drain_before", "idle"


@dataclass(frozen=True, slots=True)
class NestedOptions:
    """The options of `serve agent` about an outer job, as given. `nested` is None if the agent is to find out."""

    nested: bool | None = None
    until: str = ""
    duration: str = ""
    drain_before: str = ""
    idle: str = ""


def read_nesting(options: NestedOptions, environment: Mapping[str, str]) -> Nesting | None:
    """Return how an agent behaves in the job of another system that it runs in, and say so; None if in none.

    Raises:
        CommandError: an option is invalid, or needs an outer job.
    """
    from cotenant.node_agent.enforcement.cgroup_mounts import find_mounts
    from cotenant.node_agent.probes.outer_job import Nesting, ask_slurm, find_outer_job, given_by_process

    end, margin_seconds, idle_seconds = _times(options)
    mounts = find_mounts()
    job = None if options.nested is False else find_outer_job(environment, mounts)
    if job is None and options.nested:
        job = given_by_process(environment, mounts)
    if job is None:
        given = [name for name in ("until", "duration", "idle") if getattr(options, name)]
        if given:
            flags = " and ".join(f"--{'for' if name == 'duration' else name}" for name in given)
            raise usage_error(f"{flags} must be used with --nested: this agent runs in no job of another system")
        if options.nested is False:
            note("not nested: --no-nested was given")
        return None
    job = ask_slurm(job, environment) if job.id.startswith("slurm/") else job
    end = end if end is not None else job.end_time
    job = replace(job, end_time=end)
    note(f"nested in {job.name}: {job.evidence}; {_bounds(job)}")
    return Nesting(job, _drain_time(end, margin_seconds), idle_seconds)


def _times(options: NestedOptions) -> tuple[float | None, float, float]:
    """Return the end that was given, the margin before it, and the idle time. Names every invalid option."""
    now, wrong, end = time.time(), [], None
    seconds = {"for": None, "drain-before": 0.0, "idle": 0.0}
    for name, text in (
        ("for", options.duration),
        ("drain-before", options.drain_before or DRAIN_BEFORE),
        ("idle", options.idle),
    ):
        try:
            seconds[name] = parse_seconds(text) if text else seconds[name]
        except ValueError as error:
            wrong.append(f"--{name} {error}")
    if options.until and options.duration:
        wrong.append("--until and --for exclude each other")
    elif options.until:
        try:
            end = parse_time(options.until, now)
        except ValueError as error:
            wrong.append(f"--until {error}")
    elif seconds["for"] is not None:
        end = now + seconds["for"]
    if wrong:
        raise usage_error("invalid options", details=wrong)
    return end, seconds["drain-before"] or 0.0, seconds["idle"] or 0.0


def _drain_time(end: float | None, margin_seconds: float) -> float | None:
    """Return when the node is drained: the margin before the end, or less if the whole time is short."""
    return None if end is None else end - min(margin_seconds, DRAIN_SHARE_MAX * max(0.0, end - time.time()))


def _bounds(job: OuterJob) -> str:
    cores = "all cores" if job.cpus_max is None else f"{job.cpus_max} CPUs"
    gpus = "all GPUs" if job.gpus is None else f"GPUs {','.join(job.gpus)}" if job.gpus else "no GPUs"
    left = "no known end" if job.end_time is None else f"{write_seconds(round(job.end_time - time.time()))} left"
    return f"at most {cores}, {gpus}, {left}"


def nested_settings(nesting: Nesting, cpus: tuple[int, ...] | None, memory_bytes: int | None) -> dict[str, Any]:
    """Return the settings of an agent within an outer job, as arguments of `AgentConfig`."""
    job, allowed = nesting.job, sorted(os.sched_getaffinity(0))
    given = job.select_cpus(allowed if cpus is None else [cpu for cpu in allowed if cpu in cpus])
    bounds = [bound for bound in (memory_bytes, job.memory_bytes) if bound is not None]
    return {
        "nesting": nesting,
        "cpus": cpus if cpus is None and len(given) == len(allowed) else given,
        "memory_bytes": min(bounds, default=None),
    }


def nested_node_name(job: OuterJob, environment: Mapping[str, str]) -> str:
    """Return a node id that no other job of the other system has, and no other node of this job.

    >>> from cotenant.node_agent.probes.outer_job import OuterJob
    >>> nested_node_name(OuterJob("slurm/12", ""), {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1"})
    'slurm-12-1'
    """
    name = job.id.replace("/", "-").lower()
    several = environment.get("SLURM_JOB_NUM_NODES", "1") != "1"
    return f"{name}-{environment.get('SLURM_NODEID', '0')}" if several else name


def own_address() -> str:
    """Return the host name by which other nodes reach this one."""
    return socket.gethostname()
