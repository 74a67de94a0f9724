"""Checks decoded requests against the limits of `cotenant.core.model.limits`; `request_bytes` does so before decoding.

Checked are the items of each repeated field, and the characters of each text, in the request itself and in its singular
messages. The contents of items (a job's roles, a candidate's spec) are left to validation, which knows what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from cotenant.codec import errors
from cotenant.codec.largest_fields import largest_fields
from cotenant.core.model import limits
from cotenant.core.model.job import SUBMIT_VARIABLES
from cotenant.core.model.job_array import RANGES_MAX
from cotenant.core.model.notification import TARGETS_MAX, Trigger
from cotenant.core.model.validation import Violation
from cotenant.v1 import job_pb2

DEPTH_MAX = 2  # of singular messages in a request: a filter, a job and its spec
UNLIMITED = 1 << 62  # limited by validation

# By message and field, or by field alone if it means the same in all messages.
ITEMS: Mapping[str, int] = MappingProxyType(
    {
        "JobFilter.ids": limits.FILTER_IDS_MAX,
        "JobFilter.phases": limits.FILTER_PHASES_MAX,
        "JobFilter.labels": limits.FILTER_LABELS_MAX,
        "FieldMask.paths": limits.MASK_PATHS_MAX,
        "SimulateJobRequest.more": limits.SIMULATED_MAX,
        **dict.fromkeys(
            [
                f"JobSpec.{name}"
                for name in (
                    "command",
                    "environment",
                    "labels",
                    "roles",
                    "dependencies",
                    "notify",
                    "notify_on",
                    "secrets",
                )
            ],
            UNLIMITED,
        ),
        "SubmitDirectory.environment": len(SUBMIT_VARIABLES),
        "Container.mounts": UNLIMITED,
        "PlanPlacementRequest.candidates": limits.PLAN_CANDIDATES_MAX,
        "PlanPlacementRequest.started_job_ids": UNLIMITED,  # as many as a cycle starts; the request has a limit
        "ForecastStartsRequest.candidates": limits.FORECAST_CANDIDATES_MAX,
        "ForecastStartsRequest.runs": limits.FORECAST_RUNS_MAX,
        "ForecastStartsRequest.stoppable": limits.FORECAST_RUNS_MAX,
        "AdviseAttemptsRequest.advice": limits.ADVICE_MAX,
        "ResizeReplicasRequest.resizes": limits.REPLICA_RESIZES_MAX,
        "ObserveRequest.observations": limits.OBSERVATIONS_MAX,
        "EstimateRequest.queries": limits.QUERIES_MAX,
    }
)
VALIDATED = frozenset(
    {"JobSpec", "ProgressRule", "SubmitDirectory", "PythonEnvironment"}
)  # their texts have limits of their own


def check(request: Any) -> None:
    """Reject a request with too many items in a repeated field, or too long a text.

    Raises:
        Problem: INVALID_ARGUMENT, naming each such field.
    """
    if isinstance(request, Message) and (found := list(_violations(request, "", 0))):
        raise errors.invalid(found)


def spec_violations(spec: job_pb2.JobSpec) -> list[Violation]:
    """Return where a spec exceeds the limits of any job, so that it need not be read completely."""
    if (size := spec.ByteSize()) > limits.SPEC_BYTES_MAX:
        return [
            Violation("spec", f"has {size:,} bytes; {limits.SPEC_BYTES_MAX:,} are allowed at most"),
            *(
                Violation(
                    f"spec.{field.path}", f"has {field.size:,} bytes, of {limits.SPEC_BYTES_MAX:,} allowed for the spec"
                )
                for field in largest_fields(spec.DESCRIPTOR, spec.SerializeToString())
            ),
        ]
    return [
        Violation(f"spec.{field}", f"at most {most} are allowed, not {count}")
        for field, count, most in (
            ("roles", len(spec.roles), limits.ROLES_MAX),
            ("labels", len(spec.labels), limits.LABELS_MAX),
            ("dependencies", len(spec.dependencies), limits.DEPENDENCIES_MAX),
            ("environment", len(spec.environment), limits.ENVIRONMENT_MAX),
            ("submit_directory.environment", len(spec.submit_directory.environment), len(SUBMIT_VARIABLES)),
            ("command", len(spec.command), limits.COMMAND_WORDS_MAX),
            ("notify", len(spec.notify), TARGETS_MAX),
            ("notify_on", len(spec.notify_on), len(Trigger)),
            ("secrets", len(spec.secrets), limits.SECRETS_MAX),
            ("container.mounts", len(spec.container.mounts), limits.MOUNTS_MAX),
            ("array.ranges", len(spec.array.ranges), RANGES_MAX),
        )
        if count > most
    ]


def _violations(message: Message, prefix: str, depth: int) -> Iterator[Violation]:
    repeated, texts, inner = _plan(message.DESCRIPTOR)
    for name, most in repeated:
        if (count := len(getattr(message, name))) > most:
            yield Violation(f"{prefix}{name}", f"has {count} items; {most} are allowed at most")
    for name in texts:
        if (length := len(getattr(message, name))) > limits.TEXT_LENGTH_MAX:
            yield Violation(f"{prefix}{name}", f"has {length} characters; {limits.TEXT_LENGTH_MAX} are allowed at most")
    if depth < DEPTH_MAX:
        for name in inner:
            if message.HasField(name):
                yield from _violations(getattr(message, name), f"{prefix}{name}.", depth + 1)


@cache
def _plan(descriptor: Descriptor) -> tuple[Sequence[tuple[str, int]], Sequence[str], Sequence[str]]:
    """Return a message's repeated fields with their limits, its texts, and its singular messages."""
    repeated: list[tuple[str, int]] = []
    texts: list[str] = []
    inner: list[str] = []
    for field in descriptor.fields:
        if field.is_repeated:
            most = ITEMS.get(f"{descriptor.name}.{field.name}", limits.ITEMS_MAX)
            repeated.append((field.name, most))
        elif field.type == FieldDescriptor.TYPE_STRING and descriptor.name not in VALIDATED:
            texts.append(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            inner.append(field.name)
    return tuple(repeated), tuple(texts), tuple(inner)
