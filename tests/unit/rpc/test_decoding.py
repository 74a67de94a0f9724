"""Large messages are decoded in pieces: with the same result or error, and without delaying others."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.codec.errors import Problem
from cotenant.internal.v1 import placement_service_pb2 as placement_pb
from cotenant.rpc import decoding
from cotenant.v1 import job_service_pb2 as jobs_pb

PIECE_SECONDS_MAX = 0.1


def plan(count: int) -> placement_pb.PlanPlacementRequest:
    request = placement_pb.PlanPlacementRequest(strict=True)
    for number in range(count):
        candidate = request.candidates.add(job_id=f"job-{number}", number=number)
        candidate.spec.environment[f"A{number}"] = "x" * (number % 50)
    request.reserve_after.FromSeconds(30)
    return request


def decoded(kind: Any, data: bytes) -> Any:
    return asyncio.run(decoding.decode(kind, data))


@settings(max_examples=examples(60), deadline=None)
@given(count=st.integers(0, 40), piece=st.integers(1, 500))
def test_pieces_make_the_same_message(count: int, piece: int) -> None:
    request = plan(count)
    before, decoding.PIECE_BYTES = decoding.PIECE_BYTES, piece
    try:
        assert decoded(placement_pb.PlanPlacementRequest, request.SerializeToString()) == request
    finally:
        decoding.PIECE_BYTES = before


@settings(max_examples=examples(200), deadline=None)
@given(data=st.binary(max_size=60), count=st.integers(0, 4), piece=st.integers(1, 30))
def test_both_ways_accept_the_same_bytes(data: bytes, count: int, piece: int) -> None:
    data = plan(count).SerializeToString() + data
    try:
        whole = placement_pb.PlanPlacementRequest.FromString(data)
    except DecodeError:
        whole = None
    before, decoding.PIECE_BYTES = decoding.PIECE_BYTES, piece
    try:
        parts = decoded(placement_pb.PlanPlacementRequest, data)
    except DecodeError:
        parts = None
    finally:
        decoding.PIECE_BYTES = before
    if parts is not None:  # groups, which our messages never have, are rejected in pieces
        assert parts == whole
    elif whole is not None:
        assert any(byte & 7 in (3, 4) for byte in data)


@pytest.mark.parametrize(
    "data",
    [
        plan(20_000).SerializeToString(),
        b"\x12\x00" * 150_000,
        b"\x0a\x86\x80\x10" + b"\x0a\x00" * 131_075 + b"\x0a" * 0,
    ],
    ids=["candidates", "empty messages", "a field"],
)
async def test_no_piece_takes_long(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0.0
    begun = time.thread_time()

    async def turn(seconds: float) -> None:
        nonlocal longest, begun
        longest, begun = max(longest, time.thread_time() - begun), time.thread_time()

    monkeypatch.setattr(asyncio, "sleep", turn)
    with suppress(Problem, DecodeError):
        await decoding.decode(placement_pb.PlanPlacementRequest, data)
    assert max(longest, time.thread_time() - begun) < PIECE_SECONDS_MAX


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x10\x01" * 300_000, "request: has more than 200000 items"),
        (b"\x0a\x80\x80\x80\x01" + bytes(2**21), "request: field 1 has 2097157 bytes; 1048576 are allowed at most"),
    ],
)
def test_messages_that_cannot_be_divided_are_rejected(data: bytes, told: str) -> None:
    with pytest.raises(Problem) as refused:
        decoded(jobs_pb.ListJobsRequest, data)
    assert refused.value.message == told
