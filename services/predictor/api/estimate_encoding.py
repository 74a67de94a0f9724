"""Encoding of estimates: a call has thousands of candidate predictions, so numpy builds their bytes together.

A message with eight predictions costs 15 µs field by field, and 2 µs when it is parsed from prepared bytes. All
predictions of a call are laid out as rows of one array, each field at a fixed offset: the wire format allows an integer
to use more bytes than it needs, so that every row has the same length. The result is an ordinary message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration

from cotenant.codec import objectives
from cotenant.codec.wire_format import tag_of
from cotenant.core.model.estimate import CandidateEstimate, Estimate
from cotenant.v1 import predictor_service_pb2 as pb

DURATION_SECONDS_MAX = 315_576_000_000.0  # what google.protobuf.Duration can hold
NANOS = 1_000_000_000
NO_PREDICTION = CandidateEstimate()

# A row holds the fields of one of Estimate.candidates; its tag and length are added per row.
RATE, CONFIDENCE, REMAINING, SECONDS, REST_NANOS = 0, 9, 18, 20, 27  # offsets of the fields' tags
SECONDS_BYTES, NANOS_BYTES = 6, 5  # of integers, at 7 bits each
ROW_BYTES = REST_NANOS + 1 + NANOS_BYTES
NO_REMAINING = REMAINING  # length of a row without a remaining time
CANDIDATES_TAG = tag_of(pb.Estimate.DESCRIPTOR.fields_by_name["candidates"].number)
ALLOCATION_TAG = tag_of(pb.CandidateEstimate.DESCRIPTOR.fields_by_name["allocation"].number)
SHORT = 128  # lengths below it take one byte


class EstimateWriter:
    """Writes estimates into messages; caches the allocations, which queries of one call mostly share."""

    def __init__(self) -> None:
        self._last: tuple[object, list[bytes]] = ((), [])

    def write(
        self, estimates: Sequence[Estimate], queries: Sequence[pb.EstimateQuery], messages: Sequence[pb.Estimate]
    ) -> None:
        """Fill in the message of each estimate, with one prediction per requested allocation."""
        plain = [judged for estimate in estimates for judged in estimate.candidates]
        rows = _rows(plain) if plain else b""
        at = 0
        for estimate, query, message in zip(estimates, queries, messages, strict=True):
            _write_job(estimate, message)
            judged = estimate.candidates
            if not judged:
                for _ in range(len(query.candidates) or 1):
                    message.candidates.add()
            elif any(one.latency for one in judged):
                _write_slowly(judged, query.candidates, message)
            else:
                message.MergeFromString(self._joined(judged, query.candidates, rows, at))
            at += ROW_BYTES * len(judged)

    def _joined(
        self, judged: Sequence[CandidateEstimate], asked: Sequence[pb.CandidateAllocation], rows: bytes, at: int
    ) -> bytes:
        """Return the bytes of a job's predictions; predictions with a rate include their allocation."""
        allocations = self._written(asked)
        pieces: list[bytes] = []
        for place, one in enumerate(judged):
            allocation = allocations[place] if allocations and one.rate_per_second is not None else b""
            length = (NO_REMAINING if one.remaining_seconds is None else ROW_BYTES) + len(allocation)
            pieces += (LENGTHS[length], rows[at : at + length - len(allocation)], allocation)
            at += ROW_BYTES
        return b"".join(pieces)

    def _written(self, asked: Sequence[pb.CandidateAllocation]) -> list[bytes]:
        before, written = self._last
        if asked != before:
            bodies = [one.SerializeToString() for one in asked]
            written = [ALLOCATION_TAG + _length(len(body)) + body for body in bodies]
            self._last = asked, written
        return written


def _length(size: int) -> bytes:
    return bytes([size]) if size < SHORT else bytes([size % SHORT + SHORT, size // SHORT])


LENGTHS = [CANDIDATES_TAG + _length(size) for size in range(512)]  # an allocation's GPU type has at most 256 characters


def _rows(judged: Sequence[CandidateEstimate]) -> bytes:
    """Return predictions laid out in rows; without a remaining time, the end of a row is unused."""
    rows = np.zeros((len(judged), ROW_BYTES), dtype=np.uint8)
    rows[:, RATE] = 1 << 3 | 1  # field 1, eight bytes
    rows[:, RATE + 1 : CONFIDENCE] = _doubles([one.rate_per_second or 0.0 for one in judged])
    rows[:, CONFIDENCE] = 3 << 3 | 1
    rows[:, CONFIDENCE + 1 : REMAINING] = _doubles([one.confidence for one in judged])
    rest = np.minimum([one.remaining_seconds or 0.0 for one in judged], DURATION_SECONDS_MAX)
    whole = np.floor(rest)
    rows[:, REMAINING] = 2 << 3 | 2  # field 2, length-delimited
    rows[:, REMAINING + 1] = ROW_BYTES - SECONDS
    rows[:, SECONDS] = 1 << 3
    rows[:, SECONDS + 1 : REST_NANOS] = _integers(whole.astype(np.int64), SECONDS_BYTES)
    rows[:, REST_NANOS] = 2 << 3
    rows[:, REST_NANOS + 1 :] = _integers(((rest - whole) * NANOS).astype(np.int64), NANOS_BYTES)
    return rows.tobytes()


def _doubles(figures: Sequence[float]) -> npt.NDArray[np.uint8]:
    return np.array(figures, dtype="<f8").view(np.uint8).reshape(-1, 8)


def _integers(figures: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint8]:
    """Return integers as varints of a fixed length: seven bits per byte, lowest first, continuation bits set."""
    septets = (figures[:, None] >> (7 * np.arange(size))) & 0x7F
    septets[:, :-1] |= 0x80
    return septets.astype(np.uint8)


def _write_job(estimate: Estimate, message: pb.Estimate) -> None:
    """Write the fields of the job as a whole; zeros are left out."""
    message.source = estimate.source
    if estimate.predictable:
        message.predictable = True
    if estimate.confidence:
        message.confidence = estimate.confidence
    if estimate.cores_useful:
        message.cores_useful = estimate.cores_useful
        message.cores_useful_confidence = estimate.cores_useful_confidence
    if estimate.remaining_seconds is not None:
        _set(message.remaining, estimate.remaining_seconds)
    if estimate.remaining_p10_seconds is not None:
        _set(message.remaining_p10, estimate.remaining_p10_seconds)
    if estimate.remaining_p90_seconds is not None:
        _set(message.remaining_p90, estimate.remaining_p90_seconds)


def _write_slowly(
    judged: Sequence[CandidateEstimate], asked: Sequence[pb.CandidateAllocation], message: pb.Estimate
) -> None:
    """Write predictions field by field: those of services, which have latencies."""
    for place, one in enumerate(judged):
        written = message.candidates.add(confidence=one.confidence, rate_per_second=one.rate_per_second or 0.0)
        if one.remaining_seconds is not None:
            _set(written.remaining, one.remaining_seconds)
        if one.latency:
            objectives.write_latency(one.latency, written.latency)
        if asked and (one.latency or one.rate_per_second is not None):
            written.allocation.CopyFrom(asked[place])


def _set(duration: Duration, seconds: float) -> None:
    if seconds > DURATION_SECONDS_MAX:
        seconds = DURATION_SECONDS_MAX
    whole = int(seconds)
    duration.seconds = whole
    duration.nanos = int((seconds - whole) * NANOS)
