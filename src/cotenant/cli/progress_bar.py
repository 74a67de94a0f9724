"""A progress bar for commands that take long."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """A progress bar on stderr, shown only on a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Progress | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, done: float, of: float | None) -> None:
        """Show the progress; `of` is None if the total is unknown."""
        if not sys.stderr.isatty():
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=of)
            self._bar.start()
        description = self._what if of is not None else f"{self._what}: {done:,.0f}"
        self._bar.update(self._bar.task_ids[0], completed=done, description=description)
