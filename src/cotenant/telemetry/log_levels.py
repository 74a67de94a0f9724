"""The level that a process logs at, unless its environment sets one."""

from __future__ import annotations

LEVEL_DEFAULT = "info"
LEVEL_OF_SERVICE = {"cli": "warning"}  # users read a command's own output
