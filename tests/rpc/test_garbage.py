from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from cotenant.rpc import garbage


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
    garbage.settle()
    for _ in range(2):
        known = Known()
        garbage.settle_again()
        left = weakref.ref(known)
        del known
        garbage.settle_again()
        assert left() is None


def test_what_stays_is_not_looked_through() -> None:
    garbage.settle()
    known = Known()
    assert gc.is_tracked(known)
    assert any(one is known for one in gc.get_objects())
    garbage.settle_again()
    assert not any(one is known for one in gc.get_objects())
    assert gc.get_threshold() == garbage.THRESHOLDS


def test_a_process_that_has_not_settled_looks_through_all_as_before() -> None:
    before = gc.get_threshold()
    garbage.settle_again()
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
