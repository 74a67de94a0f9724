"""The protos of Cotenant's public API: `include()` is the directory for `protoc -I`."""

from pathlib import Path


def include() -> Path:
    """Return the directory that has cotenant/v1/*.proto."""
    return Path(__file__).resolve().parent
