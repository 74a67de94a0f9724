"""Where a mesh on this machine keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

from cotenant.cli.annotations import typer


def resolve_state_dir(context: typer.Context) -> Path:
    """Return the state directory: from the flag, COTENANT_STATE_DIR or the default."""
    from cotenant.rpc.access import default_state_dir  # avoids an import on --help

    given = context.find_root().params.get("state_dir") or os.environ.get("COTENANT_STATE_DIR")
    return Path(given).absolute() if given else default_state_dir(os.environ)
