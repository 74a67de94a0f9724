"""The public protos in the installed package, from which clients in other languages are generated."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from cotenant.transcoding import api_model

DIRECTORY = Path(__file__).resolve().parents[1] / "protos"
DESCRIPTORS = "descriptors.binpb.gz"


def descriptors() -> FileDescriptorSet:
    """Return the descriptors of the public protos and of what they import, with comments."""
    return FileDescriptorSet.FromString(gzip.decompress((DIRECTORY / DESCRIPTORS).read_bytes()))


@cache
def api() -> api_model.Api:
    """Return the public API."""
    return api_model.load(descriptors())


def files() -> Iterator[Path]:
    """Yield the protos, relative to their directory, ours first."""
    found = (path.relative_to(DIRECTORY) for path in DIRECTORY.rglob("*.proto"))
    yield from sorted(found, key=lambda path: (path.parts[0] != "cotenant", path))


def copy(directory: Path) -> list[Path]:
    """Copy the protos below a directory, and return their paths there.

    Raises:
        OSError: a file cannot be written.
    """
    copied = []
    for path in files():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DIRECTORY / path, directory / path)
        copied.append(directory / path)
    return copied
