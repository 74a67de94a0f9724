"""What the command line says of an array as a whole: its indices, and the count of its jobs per phase."""

from __future__ import annotations

from cotenant.codec.dependencies import array_from_wire
from cotenant.codec.specs import PHASES
from cotenant.core.model.job_array import ArraySpec
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.array_service_pb2 import Array

SEPARATOR = "_"  # a job's id is the array's id, the separator and the index
# The phase of an array: the first of these phases that any of its jobs is in.
LEADING = (
    Phase.RUNNING,
    Phase.STARTING,
    Phase.STOPPING,
    Phase.QUEUED,
    Phase.SUSPENDED,
    Phase.FAILED,
    Phase.CANCELLED,
    Phase.SUCCEEDED,
)


def counts(array: Array) -> dict[str, int]:
    """Return the number of an array's jobs in each phase."""
    return {
        PHASES.names.get(one.phase, f"phase {one.phase}"): one.count
        for one in sorted(array.phase_counts, key=lambda one: one.phase)
    }


def leading_phase(array: Array) -> Phase | str:
    """Return the phase that represents an array; a phase that only a newer server knows keeps its number."""
    present = counts(array)
    return next((phase for phase in LEADING if phase in present), next(iter(present), ""))


def array_summary(array: Array) -> str:
    """Return the phases of an array's jobs as text.

    >>> from cotenant.v1.job_pb2 import PhaseCount
    >>> array_summary(Array(phase_counts=[PhaseCount(phase=1, count=97), PhaseCount(phase=3, count=3)]))
    '97 queued, 3 running'
    """
    return ", ".join(f"{count:,} {phase}" for phase, count in counts(array).items())


def indices_of(array: Array) -> ArraySpec:
    """Return an array's indices and its limit of running jobs."""
    return array_from_wire(array.spec) or ArraySpec(())
