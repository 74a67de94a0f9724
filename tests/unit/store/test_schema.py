"""Schema versions of records are respected."""

from __future__ import annotations

import pytest

from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Entry
from cotenant.store.schema import NewerSchema, read


def kept(version: int) -> Entry:
    return Entry("queue/jobs/a", records_pb2.StoredArray(schema_version=version, id="a").SerializeToString(), 1, 1)


def test_a_record_of_this_version_is_read_as_it_is() -> None:
    assert read(records_pb2.StoredArray, kept(1)) == records_pb2.StoredArray(schema_version=1, id="a")


def test_a_newer_record_is_rejected_with_its_key_and_a_remedy() -> None:
    with pytest.raises(
        NewerSchema, match=r"queue/jobs/a has schema 2, and this version reads up to 1.*run that version"
    ):
        read(records_pb2.StoredArray, kept(2))


@pytest.mark.parametrize(("version", "steps_done"), [(1, 2), (2, 1), (3, 0), (0, 2)])
def test_an_older_record_is_upgraded_step_by_step(version: int, steps_done: int) -> None:
    def step(record: records_pb2.StoredArray) -> None:
        record.count += 1

    record = read(records_pb2.StoredArray, kept(version), {records_pb2.StoredArray: (step, step)})
    assert (record.schema_version, record.count) == (3, steps_done)


def test_unknown_fields_of_a_newer_version_are_kept_when_rewritten() -> None:
    added = b"\xf2\x07\x03new"  # field 126, which no version has had
    entry = Entry("queue/arrays/a", kept(1).value + added, 1, 1)
    assert read(records_pb2.StoredArray, entry).SerializeToString().endswith(added)
