"""Recordings as Parquet: one row per event, one column per field. Needs pyarrow, from the extra `research`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from cotenant.extras import how_to_install
from cotenant.simulator.recording.event_validation import BadRecording
from cotenant.simulator.recording.events import EVENT_FIELDS, PLACE_FIELDS, Event, Place, line_of

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise BadRecording(f"Parquet needs pyarrow: {how_to_install('research')}, or write .jsonl") from error

ROWS_AT_ONCE = 16_384
HEADER, END = b"cotenant.header", b"cotenant.end"


def _in_order(of: type[Event | Place], names: Sequence[str]) -> list[Field[Any]]:
    known = {each.name: each for each in fields(of)}
    return [known[name] for name in names]


def _type_of(annotation: object) -> pa.DataType:
    """Return the Arrow type of a field."""
    places = pa.struct(
        [(each.name, pa.string() if each.type == "str" else pa.int64()) for each in _in_order(Place, PLACE_FIELDS)]
    )
    kinds: Mapping[str, pa.DataType] = {
        "str": pa.string(),
        "Kind": pa.string(),
        "float": pa.float64(),
        "int": pa.int64(),
        "bool": pa.bool_(),
        "tuple[str, ...]": pa.list_(pa.string()),
        "tuple[Place, ...]": pa.list_(places),
        "Mapping[str, float]": pa.map_(pa.string(), pa.float64()),
    }
    return kinds[str(annotation).removesuffix(" | None")]


SCHEMA = pa.schema([(each.name, _type_of(each.type)) for each in _in_order(Event, EVENT_FIELDS)])


class ParquetSink:
    """A sink of Parquet rows, written some thousands at a time."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def header(self, line: str) -> None:
        """Keep the header in the metadata."""
        self._writer.add_key_value_metadata({HEADER: line.encode()})

    def event(self, event: Event, line: str) -> None:
        """Buffer a row."""
        self._rows.append(event.as_dict())
        if len(self._rows) >= ROWS_AT_ONCE:
            self._write()

    def close(self, line: str) -> None:
        """Write the buffered rows, and the end."""
        self._write()
        self._writer.add_key_value_metadata({END: line.encode()})
        self._writer.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        with suppress(OSError, pa.ArrowException):
            self._writer.close()

    def _write(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
            self._rows.clear()


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield a recording's lines as in a file of JSON lines.

    Raises:
        BadRecording: it cannot be read, or is not a recording.
    """
    try:
        with pq.ParquetFile(path) as file:
            told = file.metadata.metadata or {}
            if HEADER not in told:
                raise BadRecording(f"{path} is not a recording of events: its metadata holds no header")
            yield told[HEADER] + b"\n"
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield f"{line_of(_set_fields(row))}\n".encode()
            if END in told:
                yield told[END] + b"\n"
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:  # TypeError: a column of bytes, or of dates
        raise BadRecording(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _set_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that are set."""
    said = {name: value for name, value in row.items() if value is not None}
    if "nodes" in said:
        said["nodes"] = [{name: value for name, value in place.items() if value is not None} for place in said["nodes"]]
    if "numbers" in said:
        said["numbers"] = dict(said["numbers"])
    return said
