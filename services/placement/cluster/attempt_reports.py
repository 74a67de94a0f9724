"""What placement keeps of an agent's report on its part of an attempt."""

from __future__ import annotations

from cotenant.core.failures.classifier import SIGNS_MAX, TAIL_LENGTH_MAX
from cotenant.core.model.lifecycle import AttemptState
from cotenant.services.placement.cluster.live_records import Live, State
from cotenant.v1 import job_pb2, node_service_pb2

MESSAGE_LENGTH_MAX = 1_000  # of what an agent says went wrong
SIGN_LENGTH_MAX = 200
_BEFORE_LAUNCH = (None, AttemptState.ASSIGNED)


def state_of(live: Live, node_id: str, report: node_service_pb2.AttemptReport) -> AttemptState:
    """Return the state that a report gives to a part; an agent cannot take back that it launched it."""
    state = State.from_wire(report.state)
    if state is AttemptState.NOT_LAUNCHED and live.parts.get(node_id) not in _BEFORE_LAUNCH:
        return AttemptState.FAILED
    return state


def end_of_unknown(live: Live, node_id: str) -> AttemptState:
    """Return how the part of a stopping attempt ended that its agent no longer knows.

    A leader keeps the ends of parts in memory only, and its agents forget an end that was acknowledged. So a new leader
    reads from the record why the other parts were stopped: with neither an exit nor a launch failure on record, the
    part that broke the gang was lost, as after a reboot.
    """
    if live.attempt.stop_reason != job_pb2.STOP_REASON_GANG_BROKEN:
        return AttemptState.STOPPED
    if live.attempt.HasField("launch_failure"):
        broken, state = live.attempt.launch_failure.node_id, AttemptState.NOT_LAUNCHED
    elif live.attempt.HasField("exit"):
        broken, state = live.attempt.exit.node_id, AttemptState.FAILED
    else:
        return AttemptState.LOST
    return state if broken == node_id else AttemptState.STOPPED


def keep(live: Live, node_id: str, state: AttemptState, report: node_service_pb2.AttemptReport) -> None:
    """Record how a part ended, in the attempt; of several parts that ended badly the first one counts."""
    message = report.message[:MESSAGE_LENGTH_MAX]
    explained = live.attempt.HasField("exit") or live.attempt.HasField("launch_failure")
    if state is AttemptState.NOT_LAUNCHED:
        _keep_launch_failure(live.attempt, node_id, report.launch_cause, message)
    elif state is AttemptState.FAILED and not explained:
        live.attempt.exit.CopyFrom(report.exit)
        live.attempt.exit.node_id = node_id
        live.attempt.output_tail = report.output_tail[-TAIL_LENGTH_MAX:]
        live.attempt.message = message
    elif not live.attempt.message:  # what a user should know of a good end too, such as output that was dropped
        live.attempt.message = message
    if report.signs and not live.attempt.signs:
        live.attempt.signs[:] = [sign[:SIGN_LENGTH_MAX] for sign in report.signs[:SIGNS_MAX]]
    if report.stop_reason == job_pb2.STOP_REASON_DISCONNECTED:
        live.disconnected = message or "it stopped by itself"


def _keep_launch_failure(
    attempt: job_pb2.Attempt, node_id: str, cause: job_pb2.LaunchCause.ValueType, reason: str
) -> None:
    """Record why a part was not launched. The failure of another part is dropped: it was left without its peer."""
    if attempt.HasField("launch_failure"):
        return
    known = cause in job_pb2.LaunchCause.values() and cause != job_pb2.LAUNCH_CAUSE_UNSPECIFIED
    attempt.launch_failure.cause = cause if known else job_pb2.LAUNCH_CAUSE_OTHER
    attempt.launch_failure.reason = attempt.message = reason
    attempt.launch_failure.node_id = node_id
    attempt.ClearField("exit")
    attempt.ClearField("output_tail")
