"""Undoes what a server does to the garbage collector of its process."""

from __future__ import annotations

import gc

from cotenant.rpc import gc_tuning


def untune_gc(thresholds: tuple[int, int, int]) -> None:
    """Set the thresholds back, and freeze what is alive, as after the collection of tests."""
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc_tuning._tuned = False
    gc.collect()
    gc.freeze()
