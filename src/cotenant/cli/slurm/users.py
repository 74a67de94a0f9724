"""The user who calls a command."""

from __future__ import annotations

import os
import pwd


def user_name() -> str:
    """Return the caller's name on this machine."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
