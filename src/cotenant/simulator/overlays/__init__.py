"""Overlays: additions to a trace, made explicitly, with a seed, and recorded.

`--overlay models=synergy,cores=auto,tenants=8,seed=3` lists the additions. An overlay is a pure function from a trace
to a trace; it takes precedence over the trace. Each key draws from its own random stream, derived from the seed and its
name, and draws for the trace's own jobs before those that another overlay added: so adding a key changes nothing that
the others draw, and the same keys give the same jobs on any machine. The keys are applied in the order of `KINDS`, in
whatever order they are written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from cotenant.core.model.validation import Violation, shown
from cotenant.core.policy.options import BadOption
from cotenant.core.spelling import did_you_mean
from cotenant.simulator.overlays.cores import Cores
from cotenant.simulator.overlays.cpu_jobs import CpuJobs
from cotenant.simulator.overlays.deadlines import Deadlines
from cotenant.simulator.overlays.fractions import Fractions
from cotenant.simulator.overlays.gpu_type import GpuType
from cotenant.simulator.overlays.models import Models
from cotenant.simulator.overlays.outcomes import Outcomes
from cotenant.simulator.overlays.port import Kind, Overlay, Setting
from cotenant.simulator.overlays.priorities import Priorities
from cotenant.simulator.overlays.sizes import Sizes
from cotenant.simulator.overlays.tenants import Tenants
from cotenant.simulator.traces import Trace, TraceJob

if TYPE_CHECKING:
    from cotenant.simulator.clusters.cluster import Cluster

__all__ = ["KINDS", "NOTHING", "Overlay", "Overlays", "parse_overlays"]

SEED_KEY = "seed"
KINDS: Mapping[str, Kind] = {
    kind.key: kind
    for kind in (GpuType, Models, Fractions, Cores, CpuJobs, Tenants, Priorities, Deadlines, Outcomes, Sizes)
}


@dataclass(frozen=True, slots=True)
class Overlays:
    """Overlays by key, as written, and their common seed."""

    given: Mapping[str, str]
    made: tuple[Overlay, ...]
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.made)

    def apply(self, trace: Trace, cluster: Cluster) -> Trace:
        """Apply all of them to a trace that is to be run on a cluster; a trace with these overlays is unchanged.

        Raises:
            BadOption: an overlay does not match the trace or the cluster.
        """
        if trace.overlay == self.as_mapping():
            return trace
        jobs: list[TraceJob] = list(trace.jobs)
        for overlay in self.made:
            rng = np.random.default_rng([self.seed, zlib.crc32(overlay.key.encode())])
            jobs = overlay.apply(jobs, Setting(cluster, trace), rng)
        jobs.sort(key=lambda job: job.submitted_seconds)  # added jobs are at the end
        return replace(trace, jobs=tuple(jobs), overlay=self.as_mapping())

    def as_mapping(self) -> dict[str, str]:
        """Return the keys in the order of their application, and the seed."""
        return {**self.given, SEED_KEY: str(self.seed)} if self.made else {}


NOTHING = Overlays({}, ())


def parse_overlays(texts: Iterable[str]) -> Overlays:
    """Return overlays written as `key=value,key=value`.

    >>> parse_overlays(["tenants=8,models=synergy", "seed=3"]).as_mapping()
    {'models': 'synergy', 'tenants': '8', 'seed': '3'}

    Raises:
        BadOption: names each invalid key and value.
    """
    given: dict[str, str] = {}
    faults: list[Violation] = []
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            faults.append(Violation(text or "nothing", "must be written key=value"))
        elif key not in KINDS and key != SEED_KEY:
            faults.append(Violation(key, f"unknown overlay{did_you_mean(key, (*KINDS, SEED_KEY))}"))
        elif key in given:
            faults.append(Violation(key, "was given more than once"))
        else:
            given[key] = value
    seed = _seed(given.pop(SEED_KEY, "0"), faults)
    made = [_made(KINDS[key], given[key], faults) for key in KINDS if key in given]
    if faults:
        raise BadOption((Violation(f"overlay {bad.field}", bad.description) for bad in faults), _allowed())
    ordered = {key: given[key] for key in KINDS if key in given}
    return Overlays(ordered, tuple(one for one in made if one), seed)


def _made(kind: Kind, value: str, faults: list[Violation]) -> Overlay | None:
    try:
        return kind.parse(value)
    except ValueError as error:
        faults.append(Violation(kind.key, str(error)))
        return None


def _seed(text: str, faults: list[Violation]) -> int:
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    faults.append(Violation(SEED_KEY, f"must be an integer from 0 on, not {shown(text)}"))
    return 0


def _allowed() -> dict[str, str]:
    return {key: kind.form for key, kind in KINDS.items()} | {SEED_KEY: "0"}
