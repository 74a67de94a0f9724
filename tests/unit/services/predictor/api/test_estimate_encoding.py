"""Batch encoding of estimates equals field-by-field encoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec import estimates as on_the_wire
from cotenant.core.model.estimate import CandidateEstimate, Estimate, Latency
from cotenant.services.predictor.api.estimate_encoding import DURATION_SECONDS_MAX, EstimateWriter
from cotenant.v1 import predictor_service_pb2 as pb

FIGURES = st.floats(0, 3e11)
LATENCIES = st.none() | st.builds(
    Latency, st.integers(1, 9), p99_seconds=st.none() | st.floats(0.001, 9), confidence=st.floats(0, 1)
)
ASKED = st.lists(
    st.builds(
        pb.CandidateAllocation,
        cores=st.integers(0, 4096),
        gpu_milli=st.integers(0, 64_000),
        nodes=st.integers(0, 100_000),
        gpu_type=st.sampled_from(("", "h100", "x" * 256)),
    ),
    max_size=3,
)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[pb.EstimateQuery, Estimate]:
    asked = draw(ASKED)
    judged = [
        CandidateEstimate(draw(st.none() | FIGURES), draw(st.none() | FIGURES), draw(st.floats(0, 1)), draw(LATENCIES))
        for _ in range(len(asked) or 1)
    ]
    told = draw(st.just(()) | st.just(tuple(judged)))
    predictable = draw(st.booleans())
    estimate = Estimate(
        predictable, draw(st.floats(0, 1)), draw(st.none() | FIGURES), None, draw(st.none() | FIGURES), None, told, "so"
    )
    return pb.EstimateQuery(job_id="j", candidates=asked), estimate


@given(st.lists(jobs(), max_size=4))
def test_batch_encoding_equals_encoding_field_by_field(
    told: list[tuple[pb.EstimateQuery, Estimate]],
) -> None:
    response = pb.EstimateResponse()
    queries, estimates = [query for query, _ in told], [estimate for _, estimate in told]
    EstimateWriter().write(estimates, queries, [response.estimates.add(job_id="j") for _ in told])
    for query, estimate, message in zip(queries, estimates, response.estimates, strict=True):
        plain = pb.Estimate()
        plain.CopyFrom(message)
        for one in plain.candidates:
            one.ClearField("allocation")
        wanted = on_the_wire.estimate_to_wire("j", estimate)
        if not estimate.candidates:
            wanted.candidates.extend(pb.CandidateEstimate() for _ in range(len(query.candidates) or 1))
        (bare, durations), (wanted_bare, wanted_durations) = map(_without_durations, (plain, wanted))
        assert bare == wanted_bare
        assert durations == [one if one is None else pytest.approx(one, abs=1e-6) for one in wanted_durations]
        for place, judged in enumerate(estimate.candidates):
            known = judged.rate_per_second is not None or judged.latency is not None
            assert message.candidates[place].HasField("allocation") == (known and bool(query.candidates))
            if known and query.candidates:
                assert message.candidates[place].allocation == query.candidates[place]


def _without_durations(message: pb.Estimate) -> tuple[pb.Estimate, list[float | None]]:
    """Return a copy without its durations, and these in seconds: they may be rounded or truncated."""
    bare, durations = pb.Estimate(), []
    bare.CopyFrom(message)
    for holder in (bare, *bare.candidates):
        for name in ("remaining", "remaining_p10", "remaining_p90"):
            if name in holder.DESCRIPTOR.fields_by_name:
                told = getattr(holder, name)
                durations.append(told.seconds + told.nanos / 1e9 if holder.HasField(name) else None)
                holder.ClearField(name)
    return bare, durations


def test_an_infinite_time_is_encoded_as_the_maximum() -> None:
    message = pb.Estimate()
    told = Estimate(candidates=(CandidateEstimate(1e-9, 1e15, 0.5),))
    EstimateWriter().write([told], [pb.EstimateQuery(candidates=[pb.CandidateAllocation(cores=1)])], [message])
    assert message.candidates[0].remaining.seconds == DURATION_SECONDS_MAX
