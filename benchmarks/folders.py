"""What an upload costs: a folder of many files, sent to the folders of a queue, then again unchanged.

    python -m benchmarks.folders [--quick] [--json]

The second time only times and sizes of the files are compared, and one question is asked. The reference is a plain read
and SHA-256 of the same files, and for the second time a walk through the folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks import harness

from cotenant.cli.jobs.folder_digests import RACY_SECONDS
from cotenant.cli.jobs.folder_upload import Prepared, prepare
from cotenant.services.queue.folders.folder_store import FolderRules, FolderStore

FILES, FILES_QUICK = 10_000, 500
FILE_BYTES = 107_374  # 1 GiB over 10,000 files
AGAIN_SECONDS_MAX = 2.0
FILES_PER_DIRECTORY = 100
SENT_BYTES = 3 * 2**20


def make(root: Path, files: int) -> None:
    """Make the folder."""
    rng = Random(1)
    for number in range(files):
        path = root / f"d{number // FILES_PER_DIRECTORY}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(FILE_BYTES))


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def read_all(root: Path) -> None:
    """Read and hash every file."""
    for place, _, names in os.walk(root):
        for name in names:
            hashlib.sha256(Path(place, name).read_bytes()).digest()


def walk(root: Path) -> None:
    """Look at every file."""
    for place, _, names in os.walk(root):
        for name in names:
            os.lstat(os.path.join(place, name))


def send(prepared: Prepared, folders: FolderStore) -> None:
    """Do what a client and the queue do, without the calls between them."""
    own = folders.of("lab")
    if own.missing(prepared.pages):
        batch, size = list[bytes](), 0
        for digest in own.missing(list(prepared.sources)):
            source = prepared.sources[digest]
            if source.page is not None:
                batch.append(source.page)
            else:
                with open(os.path.join(prepared.found.root, source.path), "rb") as file:
                    file.seek(source.place)
                    batch.append(file.read(source.size))
            size += source.size
            if size > SENT_BYTES:
                own.write(batch)
                batch, size = [], 0
        own.write(batch)
    own.commit(prepared.pages)


def measure(quick: bool) -> list[harness.Row]:
    """Return the rows."""
    files = FILES_QUICK if quick else FILES
    with tempfile.TemporaryDirectory() as place:
        root, folders = Path(place, "root"), FolderStore(FolderRules(Path(place, "store")))
        os.environ["XDG_CACHE_HOME"] = str(Path(place, "cache"))
        make(root, files)
        time.sleep(RACY_SECONDS)  # a file is read again if it was written just before
        hashed, walked = seconds(lambda: read_all(root)), seconds(lambda: walk(root))
        first = seconds(lambda: send(prepare(str(root)), folders))
        again = min(seconds(lambda: send(prepare(str(root)), folders)) for _ in range(3))
    megabytes = files * FILE_BYTES / 1e6
    return [
        harness.Row(
            f"first upload of {files:,} files, {megabytes:,.0f} MB", first, "s", hashed, "read and SHA-256"
        ),
        harness.Row(
            f"second upload of {files:,} files, {megabytes:,.0f} MB", again, "s", walked, "a walk",
            f"at most {AGAIN_SECONDS_MAX:g} s", again <= AGAIN_SECONDS_MAX,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    harness.main(measure, __doc__ or "")
