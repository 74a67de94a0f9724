"""The end of a process's output, reported when it fails."""

from __future__ import annotations

from pathlib import Path

TAIL_BYTES_MAX = 4096


def tail_of(directory: Path, rank: int, bytes_max: int = TAIL_BYTES_MAX) -> str:
    """Return the last whole lines of a rank's output within `bytes_max`; "" if there are none.

    A single longer line loses its beginning. Undecodable bytes are replaced.
    """
    path = directory / f"output-{rank}.log"
    data = _end_of(path, bytes_max + 1)
    if len(data) <= bytes_max:
        data = _end_of(path.with_name(path.name + ".1"), bytes_max + 1 - len(data)) + data
    if len(data) > bytes_max:
        data = data[-bytes_max - 1 :]
        _, newline, whole = data.partition(b"\n")
        data = whole if newline and whole.strip() else data[1:]
    text = data.decode(errors="replace").replace("\0", "")
    while len(text.encode()) > bytes_max:  # replacements are longer than the original bytes
        text = text[len(text) // 8 + 1 :]
    return text


def _end_of(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - bytes_max))
            return file.read(bytes_max)
    except OSError:
        return b""
