"""Limits the bytes of encoded requests, and so the cost of decoding them.

Users' calls have small limits; services and agents, which are authenticated by then, may send as much as the server's
`message_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pool

from cotenant.codec import errors
from cotenant.codec.errors import Violation
from cotenant.codec.largest_fields import FieldSize, largest_fields
from cotenant.core.model import limits

BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(
            ("JobService", "ArrayService", "TenantService", "NodeService", "PolicyService", "ProcessService"),
            limits.REQUEST_BYTES_MAX,
        ),
        "ScheduleService": limits.REQUEST_BYTES_MAX,
        "AdviceService": limits.REQUEST_SNAPSHOT_BYTES_MAX,
        "ScheduleService/CreateSchedule": limits.REQUEST_SPEC_BYTES_MAX,
        "SecretService": limits.REQUEST_BYTES_MAX,
        "SecretService/SetSecret": limits.REQUEST_SECRET_BYTES_MAX,
        "FolderService/FindMissingChunks": limits.REQUEST_DIGESTS_BYTES_MAX,
        "FolderService/WriteChunks": limits.REQUEST_CHUNKS_BYTES_MAX,
        "FolderService/CommitFolder": limits.REQUEST_BYTES_MAX,
        "FolderService/ReadChunks": limits.REQUEST_BYTES_MAX,
        "ArrayService/CreateArray": limits.REQUEST_SPEC_BYTES_MAX,
        "ArrayService/ListArrays": limits.REQUEST_SPECS_BYTES_MAX,
        "JobService/CreateJob": limits.REQUEST_SPEC_BYTES_MAX,
        "JobService/UpdateJob": limits.REQUEST_SPEC_BYTES_MAX,
        "JobService/ListJobs": limits.REQUEST_SPECS_BYTES_MAX,
        "JobService/WatchJobs": limits.REQUEST_SPECS_BYTES_MAX,
        "JobService/SimulateJob": limits.REQUEST_SPECS_BYTES_MAX,
    }
)


@cache
def bytes_max(method: str) -> int:
    """Return how many bytes a request of a method may have; 0: the server's limit.

    >>> bytes_max("/cotenant.v1.JobService/GetJob"), bytes_max("/cotenant.agent.v1.AgentService/Connect")
    (65536, 0)
    """
    service, _, name = method[1:].rpartition("/")
    service = service.rpartition(".")[2]
    return BYTES.get(f"{service}/{name}", BYTES.get(service, 0))


def check_bytes(method: str, data: bytes) -> None:
    """Reject an encoded request that has too many bytes; the error names its largest fields.

    Raises:
        Problem: INVALID_ARGUMENT.
    """
    most = bytes_max(method)
    if most and len(data) > most:
        raise errors.invalid(bytes_violations(method, data, most))


def bytes_violations(method: str, data: bytes, most: int) -> list[Violation]:
    """Return why an encoded request is too large: its bytes, and those of its largest fields."""
    return [
        Violation("request", f"has {len(data):,} bytes; {most:,} are allowed at most"),
        *(
            Violation(field.path, f"{_size(field)}, of {most:,} allowed for the whole request")
            for field in _largest(method, data)
        ),
    ]


def _largest(method: str, data: bytes) -> Sequence[FieldSize]:
    try:
        described: Any = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", "."))
    except KeyError:
        return ()
    return largest_fields(described.input_type, data)


def _size(field: FieldSize) -> str:
    return f"has {'' if field.complete else 'at least '}{field.size:,} bytes"
