"""Commands that a test may cut off at a fail point."""

from __future__ import annotations

import os

from cotenant import fail_points
from cotenant.cli.outcome import usage


def arm_fail_points() -> None:
    """Let a test cut this process off where it wants.

    Raises:
        CommandError: what COTENANT_FAIL_POINTS says cannot be.
    """
    try:
        fail_points.arm(os.environ.get(fail_points.VARIABLE, ""))
    except ValueError as error:
        raise usage(str(error)) from None
