"""Placement that loses the least to later tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cotenant.core.capacity.ledger import Ledger, Offer, Share, Transaction
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import WHOLE_GPU_MILLI, Locality
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.validation import Violation
from cotenant.core.placement.assembly import place_on_fewest
from cotenant.core.placement.packing import Nodes, hardest_first, room_for_all
from cotenant.core.placement.unschedulable import no_place
from cotenant.policies.fgd.fragmentation import IMPOSSIBLE, Increases, Measure

JOBS_MAX = 2**13  # remembered, so that a waiting job is counted once; also, when counts are halved
KINDS_MAX = 256  # of counted tasks
DEMANDS_MAX = 1024  # whose increases by node are cached
TASKS_MAX = 64  # used for measuring: the tasks that request the most GPUs in total


@dataclass(frozen=True, slots=True)
class _Task:
    """One kind of task from the options."""

    demand: Demand
    weight: int


def _read(text: str) -> _Task:
    """Parse `GPU thousandths/cores/weight`.

    >>> _read("460/6/12").demand.cores
    6
    """
    milli, cores, weight = (int(number) for number in text.split("/"))
    if not (milli > 0 and (milli < WHOLE_GPU_MILLI or milli % WHOLE_GPU_MILLI == 0) and cores >= 0 and weight > 0):
        raise ValueError
    return _Task(Demand(milli, cores), weight)


class FragmentationGradientDescent:
    """Place each replica on the node, and the GPU, where the least free capacity is lost to later tasks.

    Fragmentation gradient descent (Weng et al., ATC 2023, section 4 [P]): the place where F_n(M) grows least, the share
    of a node's free GPUs that the workload M is expected to be unable to use; `cotenant.policies.fgd.fragmentation` has
    the measure. Ties are broken by best fit: the fewest GPUs left, then the fewest cores, then the first node [R].

    M is the option `workload`, else the gangs that were placed or refused, each counted once; M is updated whenever
    twice as many are known [R]. The paper takes it from a trace, each task by its popularity; here every kind of task
    has the same weight unless `weights` says otherwise, so that rare and demanding tasks still find a place when most
    of a cluster is taken [R].

    The paper's tasks are single pods. Here a gang goes to one node if possible, its replicas one after another, those
    with GPUs first; else each replica goes where it costs least [R]. A gang never waits for a better place, unless its
    locality is `server`. That is a search of its own instead of scorers and their assembly: the score is one of a GPU
    as well as of a node, and it changes with each replica.

    Other jobs request one GPU with 8 cores: 2 cores are taken where those can still run.

    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=1, cores=8), NodeShape(gpus=1, cores=12)])
    >>> policy = FragmentationGradientDescent(FragmentationGradientDescent.Options(workload=("1000/8/1",)))
    >>> policy.place(Gang("a", (Part("worker", 1, Demand(cores=2)),)), ledger, np.random.default_rng(0))
    (Share(node=1, part=0, replicas=1, gpus=()),)
    """

    name = "fgd"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """The workload used for measuring.

        workload: kinds of tasks, each as GPU thousandths/cores/weight: `1000/8/50,460/6/20`; learned if empty.
        weights: weights of learned tasks: all kinds `alike`, or by `popularity` as in the paper.
        """

        workload: tuple[str, ...] = ()
        weights: Literal["alike", "popularity"] = "alike"

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            for text in self.workload:
                try:
                    _read(text)
                except ValueError:
                    configured = f"must be GPU thousandths/cores/weight, such as 1000/8/50, not {text!r}"
                    yield Violation("workload", configured)

    def __init__(self, options: Options | None = None) -> None:
        options = options or self.Options()
        tasks = [_read(text) for text in options.workload]
        configured = {task.demand: task.weight for task in tasks}
        self._workload = _Workload(configured, alike=options.weights == "alike")
        self._gradient: _Gradient | None = None

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer the places with the least increase; refuse only if there is no room."""
        self._workload.record(gang)
        whole = self._on_one(gang, ledger)
        if whole is not None:
            return whole
        if gang.locality is Locality.SERVER:
            return no_place(gang, ledger, within=Locality.SERVER)
        anywhere = self._descend(gang, ledger)
        if anywhere is None and len(gang.parts) > 1:  # one part may have taken the room that another needs
            anywhere = place_on_fewest(gang, ledger)
        return no_place(gang, ledger) if anywhere is None else anywhere

    def _on_one(self, gang: Gang, ledger: Ledger) -> Offer | None:
        nodes = room_for_all(gang, ledger)
        first = gang.parts[hardest_first(gang)[0]].demand
        while len(nodes):
            best = self._best(first, ledger, nodes)[0]
            if best is None:
                return None
            if (offer := self._descend(gang, ledger, np.array([best]))) is not None:
                return offer
            nodes = nodes[nodes != best]  # shares of several sizes did not fit after all
        return None

    def _descend(self, gang: Gang, ledger: Ledger, among: Nodes | None = None) -> Offer | None:
        """Place one replica after another; None if one of them finds no room."""
        offer: list[Share] = []
        with ledger.transaction() as transaction:
            for number in hardest_first(gang):
                placed = self._place_part(number, gang.parts[number], transaction, among)
                if placed is None:
                    return None
                offer += placed
        return tuple(offer)

    def _place_part(self, number: int, part: Part, transaction: Transaction, among: Nodes | None) -> list[Share] | None:
        ledger, demand = transaction.ledger, part.demand
        takes_share = demand.gpu_milli % WHOLE_GPU_MILLI > 0
        replicas: dict[int, int] = {}
        gpus: dict[int, list[int]] = {}
        left = part.replicas
        while left:
            room = ledger.room(demand)
            nodes = np.flatnonzero(room) if among is None else among[room[among] > 0]
            node, gpu = self._best(demand, ledger, nodes)
            if node is None:
                return None
            some = 1 if among is None or takes_share else min(left, int(room[node]))
            transaction.take(node, demand, some, (gpu,) if takes_share else ())
            replicas[node] = replicas.get(node, 0) + some
            gpus.setdefault(node, []).extend([gpu] * takes_share)
            left -= some
        return [Share(node, number, replicas[node], tuple(gpus[node])) for node in sorted(replicas)]

    def _best(self, demand: Demand, ledger: Ledger, nodes: Nodes) -> tuple[int | None, int]:
        """Return the best of some nodes, and the GPU to share there (-1: none in particular)."""
        if self._gradient is None or not self._gradient.is_current(ledger, self._workload):
            self._gradient = _Gradient(ledger, self._workload)
        found = self._gradient.of(demand)
        for least in (found.increase, ledger.free_milli, ledger.free_cores):
            here = least[nodes]
            nodes = nodes[here == here.min(initial=IMPOSSIBLE)]
        if not len(nodes):
            return None, -1
        return int(nodes[0]), int(found.gpu[nodes[0]])


class _Workload:
    """The tasks used for measuring: configured, or counted from gangs. `version` changes with them."""

    def __init__(self, configured: Mapping[Demand, int], *, alike: bool) -> None:
        self._configured, self._alike = configured, alike
        self._counts: dict[Demand, int] = {}
        self._jobs: dict[str, None] = {}
        self._seen, self._due = 0, 1
        self.version = 0

    def record(self, gang: Gang) -> None:
        """Count a gang the first time it is seen."""
        if self._configured or gang.job_id in self._jobs:
            return
        self._jobs[gang.job_id] = None
        for part in gang.parts:
            if part.demand.gpu_milli:
                self._counts[part.demand] = self._counts.get(part.demand, 0) + part.replicas
        self._seen += 1
        if len(self._jobs) > JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        if self._seen % JOBS_MAX == 0:
            self._counts = {demand: count // 2 for demand, count in self._counts.items() if count > 1}
        if len(self._counts) > KINDS_MAX:
            self._counts = dict(self._largest(KINDS_MAX // 2))
        if self._seen == self._due:
            self._due += min(self._seen, JOBS_MAX)
            self.version += 1

    def tasks(self) -> Mapping[Demand, int]:
        """Return the tasks used for measuring, and their weights."""
        if self._configured:
            return self._configured
        return {demand: 1 if self._alike else count for demand, count in self._largest(TASKS_MAX)}

    def _largest(self, count: int) -> list[tuple[Demand, int]]:
        """Return the tasks that request the most GPUs in total: rare large tasks matter like common small ones."""
        by_gpus = sorted(
            self._counts.items(), key=lambda item: -item[1] * item[0].gpu_milli
        )  # ties by first occurrence
        return by_gpus[:count]


class _Gradient:
    """Increases by node for each demand, updated only for nodes that have changed."""

    def __init__(self, ledger: Ledger, workload: _Workload) -> None:
        self._ledger, self._version = ledger, workload.version
        self._measure = Measure.of(ledger, workload.tasks())
        self._known: dict[Demand, tuple[int, Increases]] = {}

    def is_current(self, ledger: Ledger, workload: _Workload) -> bool:
        """Return whether this belongs to that ledger and that workload."""
        return self._ledger is ledger and self._version == workload.version

    def of(self, demand: Demand) -> Increases:
        """Return what a replica would add on each node."""
        mark, found = self._known.get(demand, (0, None))
        changed = self._ledger.changed_since(mark)
        if found is None or changed is None:
            found = self._measure.increases(demand, np.arange(len(self._ledger)))
        elif len(changed):
            updated = self._measure.increases(demand, changed)
            found.increase[changed], found.gpu[changed] = updated.increase, updated.gpu
        if len(self._known) >= DEMANDS_MAX:
            self._known.clear()
        self._known[demand] = self._ledger.mark, found
        return found
