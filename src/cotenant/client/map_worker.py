"""The program of a map's workers: claims items, calls the function, and appends results, until no item is left.

It is copied into the map's folder and runs there with the standard library and cloudpickle alone, so that nodes need
no Cotenant. Workers share the folder and nothing else. A claim is a symbolic link named after the item, whose target is
the worker's index: it is made atomically with its owner, also on NFS. A worker that is preempted and started again
repeats its own claims that have no result. Each worker appends to a file of its own, in records: header and pickle.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HEADER = struct.Struct(">QBQ")  # the item, the kind of record, the bytes that follow
RETURNED, RAISED, TOO_LARGE = 0, 1, 2
PLAN, FUNCTION, ITEMS, CLAIMS, ALIVE = "plan.json", "function.pickle", "items.pickle", "claims", "alive"
UNSEEN_FOLDER, OTHER_PYTHON, NO_CLOUDPICKLE = 93, 94, 95  # exit codes
LEASE_CHECK_SECONDS = 1.0


def results_name(worker: int) -> str:
    """Return the name of a worker's file of results."""
    return f"results-{worker}"


def records(data: bytes) -> Iterator[tuple[int, int, bytes, int]]:
    """Yield each complete record: item, kind, pickle, and where it ends.

    >>> list(records(HEADER.pack(7, RETURNED, 2) + b"ab" + HEADER.pack(8, RETURNED, 5) + b"cut"))
    [(7, 0, b'ab', 19)]
    """
    start = 0
    while start + HEADER.size <= len(data):
        item, kind, size = HEADER.unpack_from(data, start)
        end = start + HEADER.size + size
        if end > len(data):
            return
        yield item, kind, data[start + HEADER.size : end], end
        start = end


def claim(folder: Path, item: int, worker: int) -> bool:
    """Return whether a worker gets an item: the first that asks does."""
    try:
        os.symlink(str(worker), folder / CLAIMS / str(item))
    except FileExistsError:
        return False
    return True


def claims_of(folder: Path, worker: int) -> Iterator[int]:
    """Yield the items that a worker has claimed."""
    for name in os.listdir(folder / CLAIMS):
        if os.readlink(folder / CLAIMS / name) == str(worker):
            yield int(name)


class Worker:
    """One worker of a map."""

    def __init__(self, folder: Path, worker: int, plan: dict[str, Any], dumps: Callable[[Any], bytes]) -> None:
        self._folder, self._worker, self._plan, self._dumps = folder, worker, plan, dumps
        self._results = folder / results_name(worker)
        self._checked = 0.0
        self._function = pickle.loads((folder / FUNCTION).read_bytes())

    def run(self) -> None:
        """Compute until no item is left, or the submitter is gone."""
        for item in self._unfinished():
            self._compute(item)
        taken = set(os.listdir(self._folder / CLAIMS))
        for item in range(len(self._plan["ends"])):
            if str(item) in taken:
                continue
            if self._abandoned():
                print("cotenant: the process that submitted this map is gone", flush=True)
                return
            if claim(self._folder, item, self._worker):
                self._compute(item)

    def _unfinished(self) -> list[int]:
        """Return the claims of an earlier attempt that have no result; cut off what it wrote in part."""
        if not self._results.exists():
            self._results.touch()
            return list(claims_of(self._folder, self._worker))
        whole, done = 0, set()
        for item, _, _, end in records(self._results.read_bytes()):
            whole = end
            done.add(item)
        os.truncate(self._results, whole)
        return [item for item in claims_of(self._folder, self._worker) if item not in done]

    def _abandoned(self) -> bool:
        """Return whether the submitter's sign of life is too old, by the clock of the file system."""
        lease = self._plan["lease_seconds"]
        if not lease or time.monotonic() < self._checked + LEASE_CHECK_SECONDS:
            return False
        self._checked = time.monotonic()
        own = self._folder / f"worker-{self._worker}"
        own.touch()
        return bool(own.stat().st_mtime - (self._folder / ALIVE).stat().st_mtime > lease)

    def _compute(self, item: int) -> None:
        """Call the function with an item, and append what it returns or raises."""
        try:
            args, kwargs = pickle.loads(self._item(item))
            kind, result = RETURNED, self._dumps(self._function(*args, **kwargs))
            most = self._plan["result_bytes_max"]
            if len(result) > most:
                kind, result = TOO_LARGE, self._dumps((item, len(result), most))
        except (Exception, SystemExit) as error:
            kind, result = RAISED, self._pickled_error(error)
        with self._results.open("ab") as file:  # closing it makes it visible to NFS clients
            file.write(HEADER.pack(item, kind, len(result)) + result)

    def _item(self, item: int) -> bytes:
        ends = self._plan["ends"]
        start = ends[item - 1] if item else 0
        with (self._folder / ITEMS).open("rb") as file:
            file.seek(start)
            return file.read(ends[item] - start)

    def _pickled_error(self, error: BaseException) -> bytes:
        """Return an exception with its traceback; one that cannot be pickled as its text alone."""
        shown = "".join(traceback.format_exception(error))
        name = type(error).__name__
        bare = error.with_traceback(None)
        bare.__cause__ = bare.__context__ = None
        try:
            pickled = self._dumps((bare, name, str(error), shown))
            pickle.loads(pickled)
        except Exception:  # it cannot be pickled, or not read again: any class may raise anything
            return self._dumps((None, name, str(error), shown))
        return pickled


def main(folder: Path, worker: int) -> int:
    """Run a worker; return its exit code."""
    plan = json.loads((folder / PLAN).read_text())
    version = list(sys.version_info[:2])
    if version != plan["python"]:
        theirs, ours = (".".join(map(str, one)) for one in (plan["python"], version))
        print(
            f"cotenant: the function was pickled by Python {theirs}, and this node runs it with Python {ours} "
            f"({sys.executable}): pass python=PATH of a Python {theirs} that the nodes have",
            flush=True,
        )
        return OTHER_PYTHON
    sys.path += [path for path in plan["path"] if path not in sys.path]
    try:
        import cloudpickle
    except ImportError:
        print(f"cotenant: {sys.executable} has no cloudpickle: pip install cloudpickle", flush=True)
        return NO_CLOUDPICKLE
    Worker(folder, worker, plan, cloudpickle.dumps).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(os.environ["COTENANT_ARRAY_INDEX"])))
