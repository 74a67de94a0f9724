"""`options` and `typer` for the annotations of commands: imported only where typer reads them (`cotenant.deferred`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotenant.deferred import Deferred

__all__ = ["options", "typer"]

if TYPE_CHECKING:
    import typer

    from cotenant.cli import options
else:
    options = Deferred("cotenant.cli.options")
    typer = Deferred("typer")
