"""Login links of the dashboard: each logs in once, within an hour, as the owner of the state directory.

A link's token is kept as the hash in the name of a file, so that the process that redeems it needs nothing but the
state directory, and a restart of either process neither loses nor revives a link.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

from cotenant.deferred import secrets
from cotenant.rpc.access import ensure_private

DIRECTORY = "web-logins"
LIFE_SECONDS = 3600.0
TOKEN_BYTES = 32


def mint(state_dir: Path) -> str:
    """Return the token of a new link; expired ones are removed."""
    directory = state_dir / DIRECTORY
    ensure_private(directory)
    for path in directory.iterdir():
        if not _is_fresh(path):
            path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    (directory / _name(token)).touch(mode=0o600)
    return token


def redeem(state_dir: Path, token: str) -> bool:
    """Return whether the token is that of a link which is neither used nor expired; it is used from now on."""
    path = state_dir / DIRECTORY / _name(token)
    fresh = _is_fresh(path)
    try:
        path.unlink()
    except OSError:
        return False  # another call has used it
    return fresh


def _name(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _is_fresh(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return 0 <= time.time() - path.stat().st_mtime <= LIFE_SECONDS
    return False
