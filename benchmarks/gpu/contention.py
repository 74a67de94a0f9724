"""Contention: a training with an input pipeline beside hogs of memory bandwidth and cache, eliminator off and on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks.agent_contention import (
    ALONE_WINDOWS,
    BETWEEN_WINDOWS,
    LOAD,
    WARM_WINDOWS,
    WATCHED_WINDOWS,
    WINDOW_SECONDS,
    Figures,
    Mesh,
    beside,
    last_level_cache_bytes,
    rows_of,
)
from benchmarks.gpu.machine import missing_gpu
from benchmarks.gpu.points import Point, PointRun
from benchmarks.harness import Row

KINDS = ("stream", "cache")
POLICIES = ("none", "coda-eliminator")
START_SECONDS = 30.0  # of a mesh and a training, until its rate is steady
START_SECONDS_MAX = 90.0
END_SECONDS = 20.0  # left for the end of the jobs and of the mesh


def measure(run: PointRun) -> Iterator[Row]:
    """Measure each kind of hog under each policy, as far as time allows; then watch quiet windows for false alarms."""
    kinds = kinds_within(run.left())
    found: dict[str, dict[str, Figures]] = {}
    run.raw["figures"] = found
    for policy in POLICIES:
        directory = run.directory / policy
        directory.mkdir()
        train, loads = _submissions(run, policy)
        with closing(Mesh(directory, policy, "")) as up:
            wanted = {kind: loads[kind] for kind in kinds}
            found[policy] = beside(up, policy, train, wanted, START_SECONDS_MAX)
            if policy == POLICIES[-1]:
                for kind in kinds:
                    yield from rows_of(kind, found[POLICIES[0]][kind], found[policy][kind], quiet_cores=0.0)
                yield _quiet_row(run, up)


def seconds_needed(kinds: int) -> float:
    """Return the seconds that this many kinds of hog take under both policies.

    >>> 100 < seconds_needed(1) < seconds_needed(2) < 200
    True
    """
    windows = sum(
        WARM_WINDOWS[policy] + kinds * (WATCHED_WINDOWS[policy] + 2 * (BETWEEN_WINDOWS + ALONE_WINDOWS) + 4)
        for policy in POLICIES
    )
    return len(POLICIES) * START_SECONDS + windows * WINDOW_SECONDS


def kinds_within(seconds: float) -> tuple[str, ...]:
    """Return the kinds of hog for which there is time, at least one.

    >>> kinds_within(0.0), kinds_within(1000.0)
    (('stream',), ('stream', 'cache'))
    """
    fitting = [count for count in range(1, len(KINDS) + 1) if seconds_needed(count) <= seconds]
    return KINDS[: max(fitting, default=1)]


def _submissions(run: PointRun, policy: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the arguments that submit the training, on half of the cores, and each hog, on the others."""
    machine = run.machine
    half = max(1, machine.cores // 2)
    log = run.directory / f"{policy}.steps"
    train = ["--gpus", "1", "--cpus", str(half), "--kind", "training", "--profile", "never", "--"]
    train += machine.train("image", log, "--workers", half)
    others = ["--cpus", str(max(1, machine.cores - half)), "--"]
    hogs = {kind: machine.program("hog", kind, "--cache-bytes", last_level_cache_bytes()) for kind in KINDS}
    return train, {kind: [*LOAD, *others, *command] for kind, command in hogs.items()}


def _quiet_row(run: PointRun, up: Mesh) -> Row:
    """Watch the training alone for the time that is left; return the incidents that began meanwhile."""
    begin = time.time()
    while run.left() > END_SECONDS:
        up.sample()
    late = [one for one in up.incidents() if one.start_time.ToNanoseconds() / 1e9 >= begin]
    minutes = (time.time() - begin) / 60
    run.raw["quiet_minutes"] = minutes
    return Row("false alarms while it is quiet", len(late), "", minutes, "minutes watched", "none", not late)


POINT = Point("contention", 150.0, 70.0, measure, missing_gpu)
