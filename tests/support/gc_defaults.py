"""Undoes what a server does to the garbage collector of its process."""

from __future__ import annotations

import gc

from cotenant.rpc import gc_tuning


def untune_gc(thresholds: tuple[int, int, int]) -> None:
    """Unfreeze all objects, and set the thresholds back."""
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc_tuning._tuned = False
