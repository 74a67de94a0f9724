"""`cotenant openapi` and `cotenant protos`: what clients in other languages are generated from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cotenant.cli.annotations import typer
from cotenant.cli.outcome import CommandError, note


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(openapi)
    app.command()(protos)


def openapi() -> None:
    """Print the OpenAPI 3.1 document of the public API, as the gateway serves it at /openapi.json.

    \b
    Examples:
      cotenant openapi > cotenant.json
    """
    from cotenant.transcoding import openapi as made
    from cotenant.transcoding import shipped_protos

    print(json.dumps(made.document(shipped_protos.api()), indent=2, ensure_ascii=False))


def protos(
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy them below this directory.")] = None,
) -> None:
    """Print where the installed protos of the public API are, or copy them, with the protos that they import.

    \b
    Examples:
      cotenant protos
      cotenant protos --out vendor/protos
      protoc -I "$(cotenant protos)" --go_out=. "$(cotenant protos)"/cotenant/v1/*.proto
    """
    from cotenant.transcoding import shipped_protos

    if out is None:
        print(shipped_protos.DIRECTORY)
        return
    try:
        copied = shipped_protos.copy(out)
    except OSError as error:
        raise CommandError(f"cannot write {error.filename or out}: {error.strerror}") from None
    note(f"wrote {len(copied)} files below {out}")
