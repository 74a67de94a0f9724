"""What GPU types are worth to live jobs, from their estimates and what their attempts hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from cotenant.codec import estimates, specs
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.candidate_allocations import largest_role
from cotenant.core.placement.gpu_types import effective_gpus, rates_by_type
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2


def several_types(shapes: Iterable[NodeShape]) -> bool:
    """Return whether a cluster has GPUs of more than one type."""
    return len({shape.gpu_type for shape in shapes if shape.gpus}) > 1


def gpu_worth(record: Record, shapes: Sequence[NodeShape], attempts: Iterable[job_pb2.Attempt]) -> float:
    """Return what the GPUs of some attempts were worth to a job: the mean over their run time; 1 if unknown."""
    if record.estimate is None or not record.requested_spec.gpu_milli or not several_types(shapes):
        return 1.0
    estimate, wanted = estimates.estimate_from_wire(record.estimate), largest_role(record.spec).request.gpu_type
    seconds, worth = 0.0, 0.0
    for attempt in attempts:
        ran = (
            specs.seconds(attempt.end_time) - specs.seconds(attempt.start_time) if attempt.HasField("end_time") else 1.0
        )
        seconds += (ran := max(0.0, ran))
        worth += ran * effective_gpus(estimate, type_held(attempt), shapes, wanted)
    return worth / seconds if seconds else 1.0


def type_held(attempt: job_pb2.Attempt) -> str:
    """Return the GPU type that an attempt holds; "" if it holds none, or several."""
    types = {part.gpu_type for part in attempt.allocations if part.gpu_type}
    return types.pop() if len(types) == 1 else ""


def type_in_words(record: Record, held: Iterable[Record], shapes: Sequence[NodeShape], now: float) -> str:
    """Return the job's GPU type and its speed there, compared with its fastest; "" without a choice of types.

    "runs on T4: 0.4 of its speed on A100; all A100 are taken until about 14:05". `held` are the jobs that hold
    resources.
    """
    here = type_held(record.job.attempt)
    if record.estimate is None or not here:
        return ""
    rates = rates_by_type(estimates.estimate_from_wire(record.estimate))
    if len(rates) < 2 or here not in rates:
        return ""
    best = max(rates, key=lambda kind: (rates[kind], kind))
    if best == here:
        slowest = min(rates, key=lambda kind: (rates[kind], kind))
        return f"runs on {here}: {rates[here] / rates[slowest]:.2g} times its speed on {slowest}"
    return f"runs on {here}: {rates[here] / rates[best]:.2g} of its speed on {best}{_taken(best, held, shapes, now)}"


def _taken(gpu_type: str, held: Iterable[Record], shapes: Sequence[NodeShape], now: float) -> str:
    """Return that all GPUs of a type are taken, and until when if a job that holds some is predicted to end."""
    milli, ends = 0, list[float]()
    for record in held:
        if type_held(record.job.attempt) == gpu_type:
            milli += record.requested_spec.gpu_milli
            if record.estimate is not None and (left := estimates.interval_from_wire(record.estimate)).predictable:
                ran = record.ran_seconds(now) - record.ran_before_estimate_seconds
                ends.append(max(0.0, (left.remaining_seconds or 0.0) - ran))
    total = 1000 * sum(shape.gpus * shape.count for shape in shapes if shape.gpu_type == gpu_type)
    if milli < total:
        return ""
    until = datetime.fromtimestamp(now + min(ends)).astimezone() if ends else None
    return f"; all {gpu_type} are taken" + (f" until about {until:%H:%M}" if until else "")
