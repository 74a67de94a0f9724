"""The file in which a service remembers its store across restarts: a small JSON file in the state directory."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cotenant.store.witness import RememberedStore, newest
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

FOLDER = "store-witness"  # below the state directory
BYTES_MAX = 4096


def path_of(state_dir: Path, service: str) -> Path:
    """Return the path of a service's file."""
    return state_dir / FOLDER / f"{service}.json"


def memories_of(state_dir: Path) -> dict[str, RememberedStore]:
    """Return what the services of a state directory remember, by service."""
    found = {}
    for path in sorted((state_dir / FOLDER).glob("*.json")):
        if memory := read(path):
            found[path.stem] = memory
    return found


def read(path: Path) -> RememberedStore | None:
    """Return what a file holds; None if it is missing. A damaged file is logged and counts as empty."""
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("store_witness_unreadable", path=str(path), error=str(error))
        return None
    try:
        memory = RememberedStore.decode(json.loads(text))
    except (ValueError, RecursionError):
        memory = None
    if memory is None:
        log.warning("store_witness_damaged", path=str(path))
    return memory


def write(path: Path, memory: RememberedStore) -> None:
    """Write what is remembered durably, unless another process of the service has written newer data of the store.

    Raises:
        OSError: the file cannot be written.
    """
    known = read(path)
    if known and (known.id, known.generation) == (memory.id, memory.generation):
        memory = newest(known, memory) or memory
    if known == memory:
        return
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w") as file:
            json.dump(asdict(memory), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise
