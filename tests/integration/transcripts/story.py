"""Transcript tests of the pure core: a table, a ledger and the cycle, nothing else.

A story is a file of paragraphs. Each has comments (`# why`), commands, `----`, and the result of a cycle after the
commands: what stopped, what started and where, what waits and why. Commands:

    cluster 2x4 1x0x8              nodes by GPUs and cores (default: 3 cores per GPU)
    queue las thresholds=100,200   the queue policy; `placement` and `allocator` likewise
    submit big gpus=8              8 replicas of 1 GPU; replicas=2 gpus=4 cores=2 priority=1 pinned=yes where=anywhere
    wait 100                       time passes
    finish big                     a job ends
    cordon 0, uncordon 0           a node gets no new work, gets it again
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cotenant import plugins
from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec, Locality, Request, Role
from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import outranked
from cotenant.core.model.resources import NAMES, Resources, counts_of
from cotenant.core.placement.unschedulable import shapes_of
from cotenant.core.scheduling import cycle

RULE = "----"


@dataclass
class Story:
    """A cluster, its jobs, and a clock that only commands move."""

    now: float = 0.0
    ledger: Ledger = field(default_factory=lambda: Ledger([]))
    table: JobTable = field(default_factory=JobTable)
    specs: dict[str, JobSpec] = field(default_factory=dict)
    held: dict[str, tuple[Holding, ...]] = field(default_factory=dict)
    policies: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for command in ("queue fifo", "placement consolidate", "allocator requested"):
            self.do(command)

    def do(self, line: str) -> None:
        """Execute one command."""
        verb, *words = line.split()
        match verb:
            case "cluster":
                self.ledger = Ledger([shape for word in words for shape in nodes(word)])
            case "queue" | "placement" | "allocator":
                group = {"queue": "queue_policies", "placement": "placement_policies", "allocator": "cpu_allocators"}
                self.policies[verb] = plugins.load(f"cotenant.{group[verb]}", words[0], settings(words[1:]))
            case "submit":
                self.submit(words[0], settings(words[1:]))
            case "wait":
                self.now += float(words[0])
            case "finish":
                self.free(words[0])
                self.table.remove(words[0])
            case "cordon" | "uncordon":
                self.ledger.open[int(words[0])] = verb == "uncordon"
            case _:
                raise ValueError(f"no such command: {line}")

    def submit(self, job_id: str, about: dict[str, str]) -> None:
        gpus = int(about.get("gpus", 0))
        replicas = int(about.get("replicas", max(1, gpus)))
        each = gpus if "replicas" in about else min(1, gpus)
        cores = int(about["cores"]) if "cores" in about else None
        roles = (Role("worker", replicas, Request(each * 1000, cores)),)
        spec = JobSpec(job_id, roles=roles, locality=Locality(about["where"]) if "where" in about else None)
        self.specs[job_id] = spec
        self.table.add(
            JobRow(
                job_id,
                self.now,
                sequence=len(self.specs),
                gpu_milli=spec.gpu_milli,
                cores=sum(part.replicas * part.demand.cores for part in self.gang(job_id).parts),
                priority=int(about.get("priority", 0)),
                preemptible=about.get("pinned") != "yes",
            )
        )

    def gang(self, job_id: str) -> Gang:
        allocator = self.policies["allocator"]
        return cycle.gang_of(job_id, self.specs[job_id], UNKNOWN, allocator, shapes_of(self.ledger))  # type: ignore[arg-type]  # a plug-in

    def free(self, job_id: str) -> None:
        for holding in self.held.pop(job_id, ()):
            self.ledger.release(holding)

    def schedule(self) -> list[str]:
        """Run a cycle and return its results; stops take no time."""
        policy: Any = self.policies["queue"]
        jobs, ids = self.table.jobs(self.now), list(self.table.ids)
        choice = cycle.choose(jobs, policy, policy.order(jobs, self.now), self.capacity(), now=self.now)
        victims = [
            cycle.Victim(ids[row], self.held[ids[row]], ahead)
            for row, ahead in zip(choice.victims.tolist(), choice.ahead().tolist(), strict=True)
        ]
        plan = cycle.place(
            [self.gang(ids[row]) for row in choice.starts.tolist()],
            self.ledger,
            self.policies["placement"],  # type: ignore[arg-type]  # a plug-in
            np.random.default_rng(0),
            victims=victims,
            strict=policy.strict,
        )
        ranks = {ids[row]: number for number, row in enumerate(choice.ranked.tolist(), 1)}
        waiting = plan.refusals | {
            ids[row]: outranked(ranks[ids[row]], ranks[ids[row]] - 1) for row in choice.outranked
        }
        return [
            *(self.stop(job_id) for job_id in plan.stops),
            *(self.start(start) for start in plan.starts),
            *(f"waiting: {job_id}: {waiting[job_id]}" for job_id in sorted(waiting, key=ranks.__getitem__)),
        ]

    def capacity(self) -> Capacity:
        held = [holding for holdings in self.held.values() for holding in holdings]
        gpus, *others = map(sum, zip((0,) * len(NAMES), *map(counts_of, held), strict=True))
        return self.ledger.sums(self.ledger.open) + Resources(gpus * 1000, *others)

    def stop(self, job_id: str) -> str:
        self.free(job_id)
        self.table.stop(job_id, self.now)
        return f"stopped: {job_id}"

    def start(self, start: cycle.Start) -> str:
        for holding in start.holdings:
            self.ledger.hold(holding)
        self.held[start.gang.job_id] = start.holdings
        self.table.start(start.gang.job_id, self.now)
        where = sorted((share.node, share.replicas) for share in start.offer)
        return f"started: {start.gang.job_id} on {', '.join(f'node {node} ×{count}' for node, count in where)}"


def nodes(word: str) -> list[NodeShape]:
    """Parse `2x4x12`: two nodes of 4 GPUs and 12 cores."""
    count, gpus, *cores = (int(number) for number in word.split("x"))
    return [NodeShape(gpus, cores[0] if cores else 3 * gpus)] * count


def settings(words: list[str]) -> dict[str, str]:
    """Parse `key=value` words."""
    return dict(word.split("=", 1) for word in words)


def replay(text: str) -> Iterator[tuple[str, str]]:
    """Replay a story; yield each paragraph as written, and with its actual results."""
    story = Story()
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.splitlines()
        rule = lines.index(RULE)
        for line in lines[:rule]:
            if not line.startswith("#"):
                story.do(line)
        yield paragraph, "\n".join([*lines[: rule + 1], *story.schedule()])
