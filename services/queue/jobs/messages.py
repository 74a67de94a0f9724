"""A job's record as messages: as callers see it, and as a copy to change."""

from __future__ import annotations

import time

from cotenant.services.queue.jobs import node_avoidance
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2, records_pb2


def kept_message(record: Record) -> job_pb2.Job:
    """A job as callers see it, as far as its record tells: all there is of one that has ended."""
    job = job_pb2.Job()
    job.CopyFrom(record.job)
    job.etag = str(record.revision)
    if record.spec.open:
        job.spec.roles[0].replicas = record.asks.roles[0].replicas
    if job.avoided_nodes:
        kept = node_avoidance.live(job, time.time())
        del job.avoided_nodes[:]
        job.avoided_nodes.extend(kept)
    return job


def clone(stored: records_pb2.StoredJob) -> records_pb2.StoredJob:
    """A copy to change and commit."""
    copy = records_pb2.StoredJob()
    copy.CopyFrom(stored)
    return copy
