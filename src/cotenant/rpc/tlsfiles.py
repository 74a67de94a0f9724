"""Where certificates are; apart from what reads them, so that a command can be told without loading gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the certificates are, in PEM.

    `ca` are the authorities that this end believes; `cert` and `key` are what it shows, which a client with a token
    may leave out. A server with `client_certificates` talks only to who shows a certificate of these authorities.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    client_certificates: bool = True

    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)
