"""The jobs ahead of a waiting job, in order, and how long the cluster takes for them.

Forecasts play the schedule forward for the first jobs in the order. The order has no rows for tasks held back by the
limit of their array, but such tasks come before other jobs all the same: they are inserted where their turns will
come. For a job with very many jobs ahead, the schedule is not played forward: its start is estimated from the work
ahead of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from cotenant.core.model.lifecycle import Phase
from cotenant.core.prediction.remaining_time import RemainingTime
from cotenant.rpc.slices import Slices
from cotenant.services.queue.jobs.dependency_gate import Array
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record

NO_RECORDS: Mapping[str, Record] = MappingProxyType({})


def in_order(
    state: State, ranked: Iterable[str], held_back_max: int, *, fair: bool, more: Mapping[str, Record] = NO_RECORDS
) -> Iterator[Record]:
    """Yield waiting jobs in the order of a cycle, including tasks held back by the limits of their arrays.

    At most `held_back_max` such tasks come from each array. They precede jobs that were submitted later; with fair
    sharing between tenants, only those of their own tenant. `more` are jobs of the order that are not in the state.
    """

    def known(job_id: str) -> Record | None:
        record = more.get(job_id) or state.records.get(job_id)
        return record if record and record.phase is Phase.QUEUED else None

    coming = {
        array.id: array for array in state.dependency_gate.arrays.values() if array.slots and array.slots.held_back(1)
    }
    if not coming:
        yield from (record for job_id in ranked if (record := known(job_id)))
        return
    left = {array.id: array.slots.open_count for array in coming.values() if array.slots}
    for job_id in ranked:
        if (record := known(job_id)) is None:
            continue
        task = record.spec.array_task
        if task and left.get(task.array_id):
            left[task.array_id] -= 1
        elif coming:
            for array in [
                one for one in coming.values() if not left[one.id] and _before(state, one, record, fair=fair)
            ]:
                yield from _held_back(state, coming.pop(array.id), held_back_max)
        yield record
    yield from chain.from_iterable(_held_back(state, array, held_back_max) for array in coming.values())


def _before(state: State, array: Array, record: Record, *, fair: bool) -> bool:
    """Return whether an array's tasks precede a job: it came later, and is not of another tenant under fair sharing."""
    first = state.records.get(next(iter(array.ids)))
    if first is None or (fair and first.spec.tenant != record.spec.tenant):
        return False
    return not record.sequence or first.sequence < record.sequence  # 0: not submitted


def _held_back(state: State, array: Array, most: int) -> Iterator[Record]:
    for job_id in array.slots.held_back(most) if array.slots else ():
        if (record := state.records.get(job_id)) and record.phase is Phase.QUEUED:
            yield record


@dataclass(frozen=True, slots=True)
class Backlog:
    """The jobs ahead of a job, and how long they occupy the whole cluster: the median, 10th and 90th percentile."""

    jobs: int
    seconds: float
    p10_seconds: float
    p90_seconds: float
    known: bool  # whether the remaining time of at least one job is known


class _Work:
    """Sums resources multiplied by time, by resource."""

    def __init__(self, state: State) -> None:
        self._totals = state.capacity
        self._sums = [[0.0, 0.0, 0.0] for _ in self._totals]
        self.known = False

    def add(self, record: Record, rest: RemainingTime, count: int) -> None:
        self.known |= rest.known
        for sums, amount in zip(self._sums, record.requested_spec.resources(auto=1), strict=True):
            for place, seconds in enumerate((rest.seconds, rest.p10_seconds, rest.p90_seconds)):
                sums[place] += count * amount * seconds

    def seconds(self) -> tuple[float, float, float]:
        """Return for how long the scarcest resource is occupied."""
        shares = [[one / total for one in sums] for sums, total in zip(self._sums, self._totals, strict=True) if total]
        middle, low, high = (max((share[place] for share in shares), default=0.0) for place in range(3))
        return middle, low, high


async def backlog(
    state: State, record: Record, *, fair: bool, remaining_time_of: Callable[[Record], RemainingTime]
) -> Backlog | None:
    """Return the backlog ahead of a job; None if the job is not in the order, or the capacity is unknown.

    Jobs are counted by class: equal requests and estimates, of one tenant. `remaining_time_of` returns the
    remaining time.
    """
    slices, work, ahead = Slices(), _Work(state), 0
    classes: Counter[tuple[object, ...]] = Counter()
    example: dict[tuple[object, ...], Record] = {}
    for other in in_order(state, state.ranked, len(state.records), fair=fair):
        if other is record:
            break
        kind: tuple[object, ...] = (
            other.equivalence_key,
            id(other.estimate),
            other.spec.tenant,
            other.spec.expected_seconds,
            other.spec.time_limit_seconds,
            other.attempt_number > 0,
        )
        classes[kind] += 1
        example.setdefault(kind, other)
        ahead += 1
        await slices.step()
    else:
        return None
    for kind, count in classes.items():
        work.add(example[kind], remaining_time_of(example[kind]), count)
    for runs in list(state.held.values()):
        work.add(runs, remaining_time_of(runs), 1)
    seconds = work.seconds()
    return Backlog(ahead, *seconds, work.known) if seconds[0] else None
