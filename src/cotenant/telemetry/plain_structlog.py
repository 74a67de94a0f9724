"""structlog without rich; to be imported before anything that imports structlog itself.

If rich is installed, structlog imports a hundred of its modules to color tracebacks on a terminal. Ours are plain, and
those imports are a tenth of what starting a process takes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["structlog"]


@contextmanager
def _not_installed(*names: str) -> Iterator[None]:
    """Make imports of these modules fail, as if they were not installed, unless they are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


with _not_installed("rich"):
    import structlog
