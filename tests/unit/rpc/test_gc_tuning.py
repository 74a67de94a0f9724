from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from tests.support.gc_defaults import untune_gc

from cotenant.rpc import gc_tuning


class Known:
    """State of a term: one reference cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    untune_gc(before)


def test_dead_frozen_objects_are_freed_by_a_refreeze() -> None:
    gc_tuning.tune_gc()
    for _ in range(2):
        known = Known()
        gc_tuning.refreeze()
        left = weakref.ref(known)
        del known
        gc_tuning.refreeze()
        assert left() is None


def test_frozen_objects_are_not_scanned() -> None:
    gc_tuning.tune_gc()
    known = Known()
    assert gc.is_tracked(known)
    assert any(one is known for one in gc.get_objects())
    gc_tuning.refreeze()
    assert not any(one is known for one in gc.get_objects())
    assert gc.get_threshold() == gc_tuning.THRESHOLDS


def test_a_process_without_tuning_scans_all_objects() -> None:
    before = gc.get_threshold()
    gc_tuning.refreeze()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)


def test_garbage_is_not_collected_inside_the_context_only() -> None:
    with gc_tuning.paused():
        assert not gc.isenabled()
        with gc_tuning.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
