"""Records of the notifications about jobs and arrays, each from the creation of its job on.

The record is committed with the job or the array, and deleted once nothing is left to send. So whatever ends the job,
and whoever leads then, finds what is due. Only this record has the whole targets: the job's spec has their hosts.
"""

from __future__ import annotations

from dataclasses import replace

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec
from cotenant.core.model.notification import redacted
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Entry, Put

NOTIFICATIONS = "queue/notifications/"
SCHEMA_VERSION = 1


def notification_puts(thing_id: str, spec: JobSpec) -> list[Put]:
    """Return the write of the record of a new job or array; none if it notifies nobody."""
    if not spec.notify:
        return []
    triggers = map(specs.TRIGGERS.to_wire, spec.notify_on)
    stored = records_pb2.StoredNotifications(
        schema_version=SCHEMA_VERSION, id=thing_id, targets=spec.notify, triggers=triggers
    )
    return [Put(NOTIFICATIONS + thing_id, stored.SerializeToString())]


def load_notifications(entry: Entry) -> records_pb2.StoredNotifications:
    """Return the record of an entry.

    Raises:
        NewerSchema: a newer version wrote it.
        BadRecord: it is invalid.
    """
    return schema.read(records_pb2.StoredNotifications, entry)


def without_secrets(spec: JobSpec) -> JobSpec:
    """Return a spec with the hosts of its targets only.

    >>> without_secrets(JobSpec(notify=("https://example.org/s3cret",))).notify
    ('https://example.org/…',)
    """
    return replace(spec, notify=tuple(map(redacted, spec.notify))) if spec.notify else spec
