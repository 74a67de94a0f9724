"""Validation of observations: each is accepted or rejected on its own, with the reason."""

from __future__ import annotations

from collections import OrderedDict

from cotenant.core.model.estimate import Observation
from cotenant.core.model.limits import NAME_LENGTH_MAX
from cotenant.core.model.validation import shown
from cotenant.internal.v1 import observation_service_pb2 as pb
from cotenant.services.predictor.codec import observation_of, seconds_of

ATTEMPTS_REMEMBERED = 100_000

Subject = tuple[str, int, str]  # job, attempt, topic


class ObservationIntake:
    """Validates observations. It remembers the last observation of each attempt, so that none is counted twice.

    A clock that goes backwards would produce wrong rates; a duplicate has the same time as the original.
    """

    def __init__(self, attempts_remembered: int = ATTEMPTS_REMEMBERED) -> None:
        self._attempts_remembered = attempts_remembered
        self._last_seen: OrderedDict[Subject, float] = OrderedDict()

    def take(self, message: pb.Observation) -> Observation:
        """Decode an observation that is valid and newer than the last one of its attempt.

        Raises:
            ValueError: it is invalid or not newer; the text has the reason.
        """
        if not message.job_id or len(message.job_id) > NAME_LENGTH_MAX:
            raise ValueError(f"job_id must have 1 to {NAME_LENGTH_MAX} characters, not {len(message.job_id)}")
        if message.number < 1:
            raise ValueError(f"number is {message.number}; the first attempt is 1")
        if not message.HasField("time"):
            raise ValueError("it has no time")
        observation = observation_of(message)
        self._advance((message.job_id, message.number, _about(message)), seconds_of(message.time))
        return observation

    def _advance(self, subject: Subject, seconds: float) -> None:
        before = self._last_seen.get(subject)
        if before is not None and seconds <= before:
            what = "a duplicate" if seconds == before else f"{before - seconds:g} s before the last observation"
            raise ValueError(f"its time is {seconds:.3f}, {what}")
        self._last_seen[subject] = seconds
        self._last_seen.move_to_end(subject)
        if len(self._last_seen) > self._attempts_remembered:
            self._last_seen.popitem(last=False)


def _about(message: pb.Observation) -> str:
    """Return the topic of an observation; times increase within each topic."""
    if message.HasField("run_time"):
        return "its end"
    return "a profile's end" if message.profile_done else "a profile" if message.profiled else "its windows"


def rejection(index: int, message: pb.Observation, error: ValueError) -> str:
    """Return which observation was rejected and why.

    >>> rejection(3, pb.Observation(job_id="j1", number=2), ValueError("its rate is nan"))
    "observation 3 (job 'j1', attempt 2): its rate is nan"
    """
    return f"observation {index} (job {shown(message.job_id)}, attempt {message.number}): {error}"
