"""Unpacks an image into the node's cache: a program, so that neither the agent's loop nor its memory is burdened.

It reads one JSON request from stdin, and writes JSON lines: how many bytes of the layers were read, of how many; and
last the digest of the image, or why there is none. It opens the layout's files with the rights of the job's user: who
cannot read an image cannot use it, even if it is in the cache already.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

from cotenant.node_agent.containers import oci_layout
from cotenant.node_agent.containers.layers import Unpacker
from cotenant.node_agent.containers.oci_layout import ARCHITECTURES, BadImage, Descriptor
from cotenant.node_agent.supervisor.container import as_user

ROOT, CONFIG, SIZE, NEW = "root", "config.json", "size", ".new-"
REPORT_SECONDS = 0.5
PIECE_BYTES = 1 << 20
INDEXES_MAX = 3  # nested


class HashedFile:
    """A blob that is read once: counts and hashes what is read."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file, self._progress = file, progress
        self._hash, self._size = hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most a piece of them."""
        data = self._file.read(min(size, PIECE_BYTES) if size >= 0 else PIECE_BYTES)
        self._hash.update(data)
        self._size += len(data)
        self._progress.add(len(data))
        return data

    def check(self, blob: Descriptor) -> None:
        """Read the rest. Raises `BadImage` if the blob is another one."""
        while self.read():
            continue
        if (self._hash.hexdigest(), self._size) != (blob.digest, blob.size_bytes):
            raise BadImage(f"layer {blob.digest[:12]} is damaged: its content has another digest or size")


class Progress:
    """Reports at times how many bytes were read."""

    def __init__(self, total: int) -> None:
        self._done, self._total, self._due = 0, total, time.monotonic() + REPORT_SECONDS

    def add(self, count: int) -> None:
        """Count bytes."""
        self._done += count
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REPORT_SECONDS
            answer(done=self._done, total=self._total)


def answer(**fields: object) -> None:
    """Write one line for the agent."""
    print(json.dumps(fields), flush=True)


class Layout:
    """An OCI image layout, read with the rights of a user."""

    def __init__(self, path: str, user: dict[str, object] | None) -> None:
        self._path, self._user = path, user

    def open(self, name: str) -> IO[bytes]:
        """Open a file of the layout. Raises `BadImage`."""
        path = os.path.join(self._path, name)
        try:
            with as_user(self._user):
                return open(path, "rb")
        except OSError as error:
            raise BadImage(f"{path} cannot be read: {error.strerror}") from error

    def document(self, name: str) -> bytes:
        """Return a small file. Raises `BadImage`."""
        with self.open(name) as file:
            return file.read(oci_layout.DOCUMENT_BYTES_MAX + 1)

    def blob(self, blob: Descriptor) -> bytes:
        """Return a checked document. Raises `BadImage`."""
        return oci_layout.check_blob(self.document(blob_name(blob)), blob)

    def find(self, tag: str, architecture: str) -> Descriptor:
        """Return the manifest with a tag for an architecture. Raises `BadImage`."""
        found = oci_layout.choose(oci_layout.read_index(self.document("index.json")), tag, architecture)
        for _ in range(INDEXES_MAX):
            if found.media_type not in oci_layout.INDEXES:
                return found
            found = oci_layout.choose(oci_layout.read_index(self.blob(found)), "", architecture)
        raise BadImage("its indexes are nested too deep")


def blob_name(blob: Descriptor) -> str:
    """Return where a layout has a blob."""
    return f"blobs/sha256/{blob.digest}"


@contextmanager
def decompressed(file: HashedFile, compression: str) -> Iterator[IO[bytes]]:
    """Open the archive in a layer. Raises `BadImage`."""
    if compression == "gzip":
        yield cast(IO[bytes], gzip.GzipFile(fileobj=cast(IO[bytes], file)))
    elif compression == "zstd":
        with _unzstd(file) as stream:
            yield stream
    else:
        yield cast(IO[bytes], file)


@contextmanager
def _unzstd(file: HashedFile) -> Iterator[IO[bytes]]:
    program = shutil.which("zstd")
    if program is None:
        raise BadImage("it is compressed with zstd, and this node does not have the program zstd")
    process = subprocess.Popen(
        [program, "-dc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def feed(into: IO[bytes]) -> None:
        try:
            with into:
                while piece := file.read():
                    into.write(piece)
        except BrokenPipeError:
            return  # the archive ended before the blob

    feeder = threading.Thread(target=feed, args=[process.stdin])
    feeder.start()
    try:
        yield process.stdout
        while process.stdout.read(PIECE_BYTES):
            continue
    finally:
        process.stdout.close()
        feeder.join()
        process.wait()
    if process.returncode:
        raise BadImage("a layer is damaged: zstd cannot decompress it")


def unpack(layout: Layout, manifest: oci_layout.Manifest, new: Path, bytes_max: int) -> int:
    """Unpack an image's layers into a new directory; return their size. Raises `BadImage` or `OSError`."""
    root, parent = new / ROOT, os.getppid()
    root.mkdir(parents=True, mode=0o755)

    def check() -> None:
        if os.getppid() != parent:
            sys.exit("the agent is gone")

    progress = Progress(sum(layer.size_bytes for layer in manifest.layers))
    unpacker = Unpacker(str(root), bytes_max, check)
    try:
        for layer in manifest.layers:
            with layout.open(blob_name(layer)) as opened:
                file = HashedFile(opened, progress)
                try:
                    with decompressed(file, layer.compression) as stream:
                        unpacker.unpack(stream)
                except gzip.BadGzipFile as error:
                    raise BadImage(f"layer {layer.digest[:12]} is damaged: {error}") from error
                file.check(layer)
    finally:
        unpacker.close()
    return unpacker.bytes


def prepare(request: dict[str, Any]) -> str:
    """Put an image into the cache, unless it is there; return its digest. Raises `BadImage` or `OSError`."""
    cache, machine = Path(request["cache"]), platform.machine()
    architecture = ARCHITECTURES.get(machine, machine)
    layout = Layout(request["path"], request["user"])
    found = layout.find(request["tag"], architecture)
    manifest = oci_layout.read_manifest(layout.blob(found))
    config = oci_layout.read_config(layout.blob(manifest.config), architecture)
    for layer in manifest.layers:
        layout.open(blob_name(layer)).close()  # the user may read all of it
    place = cache / found.digest
    if not place.exists():
        new = cache / f"{NEW}{found.digest}"
        shutil.rmtree(new, ignore_errors=True)
        try:
            size = unpack(layout, manifest, new, request["bytes_max"])
            (new / CONFIG).write_text(json.dumps(asdict(config)))
            (new / SIZE).write_text(str(size))
            new.rename(place)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    os.utime(place)
    return found.digest


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    os.umask(0o022)
    try:
        answer(digest=prepare(request))
    except BadImage as error:
        answer(error=f"the image {request['path']}: {error}", errno=0)
    except OSError as error:
        answer(
            error=f"the image {request['path']} cannot be unpacked: {error.strerror or error}", errno=error.errno or 0
        )


if __name__ == "__main__":
    main()
