from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence

import pytest
from structlog.testing import capture_logs
from tests.support.gc_defaults import untune_gc
from tests.unit.services.predictor.conftest import FickleStore, Restarts

from cotenant.rpc import gc_tuning
from cotenant.services.predictor.models.model_store import ModelStore
from cotenant.store.port import VALUE_BYTES_MAX, Put, Store, StoreUnavailable


class Notes:
    """Stores texts; one that starts with "!" is unreadable, and "!!" makes the whole restore fail.

    It also complains of a record that it was never given.
    """

    def __init__(self, **texts: bytes) -> None:
        self.changed = dict(texts)
        self.read: dict[str, bytes] = {}

    def dump(self) -> Mapping[str, bytes]:
        changed, self.changed = self.changed, {}
        return changed

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        if any(value.startswith(b"!!") for value in records.values()):
            raise RuntimeError("too much")
        self.read |= {key: value for key, value in records.items() if not value.startswith(b"!")}
        return ["ghost", *(key for key, value in records.items() if value.startswith(b"!"))]


async def keeper_of(store: Store, notes: Notes) -> ModelStore:
    model_store = ModelStore(store, {"notes": notes}, lambda ready: None)
    await model_store.restore()
    return model_store


async def contents(store: Store, prefix: str = "") -> dict[str, bytes]:
    return {entry.key: entry.value for entry in (await store.list(prefix)).entries}


async def test_a_corrupt_record_is_set_aside_and_the_others_are_read(restarts: Restarts) -> None:
    store = await restarts.store()
    await store.transact((), (Put("predictor/notes/good", b"a"), Put("predictor/notes/bad/one", b"!")))
    notes = Notes()
    with capture_logs() as logs:
        await keeper_of(store, notes)
    assert notes.read == {"good": b"a"}
    assert await contents(store) == {"predictor/notes/good": b"a", "unreadable/predictor/notes/bad/one": b"!"}
    assert [line["key"] for line in logs if line["event"] == "record_unreadable"] == ["predictor/notes/bad/one"]


async def test_the_models_of_an_earlier_term_are_dropped_after_a_reload() -> None:
    store, thresholds = FickleStore(), gc.get_threshold()
    gc_tuning.tune_gc()
    try:
        for _ in range(2):
            notes = Notes()
            notes.read["itself"] = notes  # type: ignore[assignment]  # as all that is learnt names each other
            await keeper_of(store, notes)
            left = weakref.ref(notes)
            del notes
            await keeper_of(store, Notes())
            assert left() is None
    finally:
        untune_gc(thresholds)


async def test_a_record_that_makes_the_whole_restore_fail_is_found_and_set_aside() -> None:
    store = FickleStore()
    await store.transact((), (Put("predictor/notes/good", b"a"), Put("predictor/notes/worse", b"!!")))
    notes = Notes()
    with capture_logs() as logs:
        await keeper_of(store, notes)
    assert notes.read == {"good": b"a"}
    assert await contents(store) == {"predictor/notes/good": b"a", "unreadable/predictor/notes/worse": b"!!"}
    assert "restore: RuntimeError: too much" in [line.get("last_error") for line in logs]


async def test_records_of_predictors_that_are_not_in_use_are_left_alone() -> None:
    store = FickleStore()
    await store.transact((), (Put("predictor/other/x", b"!"), Put("predictor/notes-2/x", b"!")))
    before = await contents(store)
    await keeper_of(store, Notes())
    assert await contents(store) == before


async def test_a_dropped_record_is_deleted() -> None:
    store = FickleStore()
    notes = Notes(a=b"1", b=b"2")
    model_store = await keeper_of(store, notes)
    await model_store.save()
    notes.changed = {"a": b""}
    await model_store.save()
    assert await contents(store) == {"predictor/notes/b": b"2"}


async def test_transactions_are_bounded_in_number_and_bytes() -> None:
    store = FickleStore()
    many = await keeper_of(store, Notes(**{f"k{index}": b"x" for index in range(250)}))
    await many.save_all(within_seconds=5)
    assert store.transactions == [100, 100, 50]
    store.transactions.clear()
    large = await keeper_of(store, Notes(**{f"k{index}": b"x" * 400_000 for index in range(5)}))
    await large.save_all(within_seconds=5)
    assert store.transactions == [2, 2, 1]


async def test_batches_shrink_after_the_store_refused_one() -> None:
    store = FickleStore()
    store.operations_max = 30
    model_store = await keeper_of(store, Notes(**{f"k{index}": b"x" for index in range(100)}))
    await model_store.save_all(within_seconds=5)
    assert max(store.transactions) <= 30
    assert len(await contents(store)) == 100


async def test_a_refused_record_is_logged_and_blocks_no_other() -> None:
    store = FickleStore()
    store.operations_max = 0
    model_store = await keeper_of(store, Notes(a=b"x"))
    with capture_logs() as logs:
        assert not await model_store.save()
    assert [(line["event"], line["key"]) for line in logs] == [("record_refused", "predictor/notes/a")]


async def test_a_too_large_record_is_logged_and_the_others_are_saved() -> None:
    store = FickleStore()
    model_store = await keeper_of(store, Notes(large=b"x" * (VALUE_BYTES_MAX + 1), small=b"x"))
    with capture_logs() as logs:
        await model_store.save()
    assert await contents(store) == {"predictor/notes/small": b"x"}
    assert [(line["event"], line["key"]) for line in logs] == [("record_too_large", "large")]


async def test_newer_changes_replace_pending_records() -> None:
    store = FickleStore()
    notes = Notes(a=b"old", b=b"b")
    model_store = await keeper_of(store, notes)
    store.away = True
    with pytest.raises(StoreUnavailable):
        await model_store.save()
    notes.changed = {"a": b"new"}
    store.away = False
    await model_store.save()
    assert await contents(store) == {"predictor/notes/a": b"new", "predictor/notes/b": b"b"}


async def test_nothing_is_written_without_changes() -> None:
    store = FickleStore()
    model_store = await keeper_of(store, Notes())
    await model_store.save()
    assert store.transactions == []
