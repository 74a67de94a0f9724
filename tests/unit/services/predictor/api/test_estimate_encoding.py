"""Batch encoding of estimates equals field-by-field encoding."""

from __future__ import annotations

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
        assert _floored(plain) == _floored(wanted)
        for place, judged in enumerate(estimate.candidates):
            known = judged.rate_per_second is not None or judged.latency is not None
            assert message.candidates[place].HasField("allocation") == (known and bool(query.candidates))
            if known and query.candidates:
                assert message.candidates[place].allocation == query.candidates[place]


def _floored(message: pb.Estimate) -> pb.Estimate:
    """Drop the last digits of durations, which may be rounded or truncated."""
    for holder in (message, *message.candidates):
        for name in ("remaining", "remaining_p10", "remaining_p90"):
            if name in holder.DESCRIPTOR.fields_by_name and holder.HasField(name):
                told = getattr(holder, name)
                seconds = round((told.seconds + told.nanos / 1e9) * 100)
                told.seconds, told.nanos = seconds, 0
    return message


def test_an_infinite_time_is_encoded_as_the_maximum() -> None:
    message = pb.Estimate()
    told = Estimate(candidates=(CandidateEstimate(1e-9, 1e15, 0.5),))
    EstimateWriter().write([told], [pb.EstimateQuery(candidates=[pb.CandidateAllocation(cores=1)])], [message])
    assert message.candidates[0].remaining.seconds == DURATION_SECONDS_MAX
