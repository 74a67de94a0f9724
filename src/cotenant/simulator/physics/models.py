"""The bundled tables of models' measured speeds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

DATA = Path(__file__).parent.parent / "data"


@cache
def bundled(name: str) -> MappingProxyType[str, Any]:
    """Return one of the bundled tables."""
    return MappingProxyType(json.loads((DATA / name).read_text(encoding="utf-8")))
