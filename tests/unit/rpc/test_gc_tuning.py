from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from cotenant.rpc import gc_tuning


class Known:
    """What a term knows: all of it names each other."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_what_was_set_apart_and_stays_no_longer_goes() -> None:
    gc_tuning.settle()
    for _ in range(2):
        known = Known()
        gc_tuning.settle_again()
        left = weakref.ref(known)
        del known
        gc_tuning.settle_again()
        assert left() is None


def test_what_stays_is_not_looked_through() -> None:
    gc_tuning.settle()
    known = Known()
    assert gc.is_tracked(known)
    assert any(one is known for one in gc.get_objects())
    gc_tuning.settle_again()
    assert not any(one is known for one in gc.get_objects())
    assert gc.get_threshold() == gc_tuning.THRESHOLDS


def test_a_process_that_has_not_settled_looks_through_all_as_before() -> None:
    before = gc.get_threshold()
    gc_tuning.settle_again()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
