"""A job's record as messages: for callers, and as a copy to change."""

from __future__ import annotations

import time

from cotenant.core.prediction.earned_trust import NOTHING_JUDGED
from cotenant.services.queue.jobs import node_avoidance
from cotenant.services.queue.jobs.objective_status import write_status
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2


def stored_message(record: Record) -> job_pb2.Job:
    """Return a job as callers see it, from its record alone; complete for an ended job."""
    job = record.copy_job()
    job.etag = str(record.revision)
    if record.spec.open:
        job.spec.roles[0].replicas = record.requested_spec.roles[0].replicas
    elif record.spec.elastic and not record.phase.ended:
        job.spec.roles[record.spec.elastic_role or 0].replicas = record.elastic_replicas
    if job.avoided_nodes:
        kept = node_avoidance.active(job, time.time())
        del job.avoided_nodes[:]
        job.avoided_nodes.extend(kept)
    if record.phase.ended:
        write_status(job, record, record.ended_seconds, NOTHING_JUDGED)
    return job


def clone(stored: records_pb2.StoredJob) -> records_pb2.StoredJob:
    """Return a copy to change and commit."""
    copy = records_pb2.StoredJob()
    copy.CopyFrom(stored)
    return copy
