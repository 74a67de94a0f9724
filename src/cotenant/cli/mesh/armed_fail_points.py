"""Fail points for tests, armed by an environment variable."""

from __future__ import annotations

import os

from cotenant import fail_points
from cotenant.cli.outcome import usage_error


def arm_fail_points() -> None:
    """Arm the fail points named by COTENANT_FAIL_POINTS, at which a test kills this process.

    Raises:
        CommandError: the variable is invalid.
    """
    try:
        fail_points.arm(os.environ.get(fail_points.VARIABLE, ""))
    except ValueError as error:
        raise usage_error(str(error)) from None
