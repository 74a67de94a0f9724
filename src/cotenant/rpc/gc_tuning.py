"""When a process that serves looks for garbage.

A service makes thousands of objects for each call, and nearly all go without being looked for. To look through all that
there is took a fourteenth of its time, and held all calls up for a tenth of a second again and again. So what is there
to stay is set apart, and never looked through. What was set apart is never found to be garbage either: whoever sets
apart again looks through all of it first.
"""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 10)  # of objects, of looks at the youngest, of looks at the younger


def settle() -> None:
    """Look for garbage less often than Python does by itself from now on, and never through what is there now."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def settle_again() -> None:
    """Set apart what has come to stay since, where this process has settled; what stays no longer goes."""
    if gc.get_freeze_count():
        settle()


def set_apart() -> None:
    """Set apart what has come to stay since, where this process has settled, without a look through all there is.

    For very many objects at once, such as the jobs of a large array: a full collection would hold all calls up for a
    quarter of a second. Only the youngest are looked through; what died in a cycle among the others stays until the
    process settles again.
    """
    if gc.get_freeze_count():
        gc.collect(0)
        gc.freeze()
