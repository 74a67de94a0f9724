from __future__ import annotations

import gc
from collections.abc import Sequence
from weakref import ref

from cotenant.core.model.dependencies import Dependency
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.services.queue.jobs.archived_jobs import ArchivedJobs
from cotenant.services.queue.jobs.job_arrays import JobArrays
from cotenant.services.queue.jobs.job_store import JOBS, JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.retention import AT_ONCE_MAX, Retention
from cotenant.services.queue.jobs.transitions import PHASES, new_record
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Committed, Compare, Conflict, Operation, Put


class Counted(MemoryStore):
    """Counts transactions."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions = 0

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        self.transactions += 1
        return await super().transact(compares, operations)


async def test_many_jobs_are_deleted_in_few_transactions_except_dependencies() -> None:
    store, state = Counted(), State()
    ids = [f"j{number:03}" for number in range(2 * AT_ONCE_MAX)]
    for job_id in ids:
        record = new_record(job_id, JobSpec(roles=(Role(),)), "eve", "")
        record.job.phase = PHASES.to_wire(Phase.SUCCEEDED)
        await store.transact([], [Put(JOBS + job_id, record.packed)])
        state.add(record)
    state.add(new_record("waits", JobSpec(roles=(Role(),), dependencies=(Dependency(ids[3]),)), "eve", ""))
    store.transactions = 0
    await Retention(state, JobArrays(JobStore(store, state)), ArchivedJobs(store, None), kept_max=0).sweep(0.0)
    assert sorted(state.records) == [ids[3], "waits"]
    assert [entry.key for entry in (await store.list(JOBS)).entries] == [JOBS + ids[3]]
    assert store.transactions == 2


def test_the_spec_of_a_deleted_job_is_freed() -> None:
    state = State()
    for number in range(3):
        spec = JobSpec(roles=(Role(),), environment=(("FILL", "x" * 100_000), ("NUMBER", str(number))))
        record = new_record(f"j{number}", spec, "eve", "")
        record.job.phase = PHASES.to_wire(Phase.SUCCEEDED)
        state.add(record)
    kept = ref(state.records["j0"].spec)
    for job_id in list(state.records):
        state.remove(job_id)
    del record, spec
    gc.collect()
    assert kept() is None


def test_jobs_with_equal_specs_share_one_object() -> None:
    state = State()
    for job_id in ("a", "b"):
        state.add(new_record(job_id, JobSpec(roles=(Role(),), labels=(("k", job_id[:0]),)), "eve", ""))
    assert state.records["a"].spec is state.records["b"].spec
