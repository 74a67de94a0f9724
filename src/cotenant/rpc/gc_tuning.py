"""Garbage-collector tuning for servers.

A service creates thousands of objects for each call, and nearly all of them are freed by reference counting. Full
collections took a fourteenth of its time, and delayed all calls by a tenth of a second again and again. So long-lived
objects are frozen (`gc.freeze`) and never scanned: what is imported when a process starts, and what a service has
loaded whenever it begins to lead. Frozen objects are never collected either, so a leader that is deposed scans all of
them once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 100)  # objects, young collections, middle collections

_tuned = False  # `gc.get_freeze_count` would say it too, by counting millions of objects one by one


@contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage inside the context: nearly all objects that imports create stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_gc() -> None:
    """Collect garbage less often than Python's default from now on, and freeze all present objects."""
    global _tuned
    _tuned = True
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def refreeze() -> None:
    """Collect and freeze again, if this process has called `tune_gc`; dead objects among the frozen are freed."""
    if _tuned:
        tune_gc()


def freeze_young() -> None:
    """Freeze new long-lived objects without a full collection, if this process has called `tune_gc`.

    For very many objects at once, such as loaded jobs or those of a large array: a full collection would delay all
    calls by a quarter of a second. Only the youngest generation is scanned; dead cycles among the others stay until the
    next `refreeze`.
    """
    if _tuned:
        gc.collect(0)
        gc.freeze()
