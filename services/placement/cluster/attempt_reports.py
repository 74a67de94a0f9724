"""Decoding of agents' reports on their parts of an attempt, and what placement records of them."""

from __future__ import annotations

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.core.failures.classifier import SIGNS_MAX, TAIL_LENGTH_MAX
from cotenant.core.model.lifecycle import AttemptState
from cotenant.services.placement.cluster.live_records import LiveAttempt, State
from cotenant.v1 import job_pb2

MESSAGE_LENGTH_MAX = 1_000  # of an agent's error message
SIGN_LENGTH_MAX = 200
CPU_SECONDS_MAX = 3e11  # as long as a duration can be
_BEFORE_LAUNCH = (None, AttemptState.ASSIGNED)


def state_of(live: LiveAttempt, node_id: str, report: agent_pb2.AttemptReport) -> AttemptState:
    """Return the reported state of a part; a launched part that is reported as not launched has failed."""
    state = State.from_wire(report.state)
    if state is AttemptState.NOT_LAUNCHED and live.parts.get(node_id) not in _BEFORE_LAUNCH:
        return AttemptState.FAILED
    return state


def note_start(live: LiveAttempt, node_id: str, report: agent_pb2.AttemptReport, *, ended: bool) -> None:
    """Note when a part began to run, and of an attempt that no report showed running, when all of its parts had.

    Such an attempt ran while no placement heard its agents: it counts as started, and its run time as used.
    """
    if report.HasField("start_time"):
        live.part_starts[node_id] = report.start_time
    starts = [live.part_starts[node] for node in live.nodes if node in live.part_starts]
    if ended and len(starts) == len(live.nodes) and not live.attempt.HasField("start_time"):
        live.attempt.start_time.CopyFrom(max(starts, key=specs.seconds))


def end_of_unknown(live: LiveAttempt, node_id: str) -> AttemptState:
    """Return how a part of a stopping attempt ended that its agent no longer knows.

    A leader keeps the ends of parts in memory only, and agents forget acknowledged ends. So a new leader derives from
    the record why the other parts were stopped: if it has neither an exit nor a launch failure, the part that broke the
    gang was lost, as after a reboot.
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


def record_end(live: LiveAttempt, node_id: str, state: AttemptState, report: agent_pb2.AttemptReport) -> None:
    """Record a part's end in the attempt; if several parts fail, the first one is recorded."""
    _record_usage(live.attempt, report)
    message = report.message[:MESSAGE_LENGTH_MAX]
    explained = live.attempt.HasField("exit") or live.attempt.HasField("launch_failure")
    if state is AttemptState.NOT_LAUNCHED:
        _record_launch_failure(live, node_id, report.launch_cause, message)
    elif state is AttemptState.FAILED and not explained:
        live.attempt.exit.CopyFrom(report.exit)
        live.attempt.exit.node_id = node_id
        live.attempt.message = message
    elif not live.attempt.message:  # a successful end can have a message too, such as dropped output
        live.attempt.message = message
    if state is AttemptState.FAILED and live.attempt.exit.node_id == node_id:  # also if the record has no evidence yet
        live.evidence.output_tail = report.output_tail[-TAIL_LENGTH_MAX:]
    if report.signs and not live.evidence.signs:
        live.evidence.signs[:] = [sign[:SIGN_LENGTH_MAX] for sign in report.signs[:SIGNS_MAX]]
    if report.stop_reason == job_pb2.STOP_REASON_DISCONNECTED:
        live.disconnected = live.disconnected or message or "it stopped on its own"
    elif report.stop_reason == job_pb2.STOP_REASON_TIME_LIMIT:  # why other parts failed or an order came too late
        live.attempt.stop_reason, live.attempt.stop_detail = report.stop_reason, message
    elif state is AttemptState.STOPPED and not live.attempt.stop_reason:
        live.attempt.stop_reason = known_stop_reason(report)  # an earlier leader's order that it could not record


def _record_usage(attempt: job_pb2.Attempt, report: agent_pb2.AttemptReport) -> None:
    """Add a part's CPU time to the attempt's, and raise the peak to the part's; negative amounts count as 0."""
    for total, used in ((attempt.cpu_time, report.cpu_time), (attempt.system_time, report.system_time)):
        seconds = specs.seconds(total) + max(0.0, specs.seconds(used))
        total.FromMicroseconds(int(min(seconds, CPU_SECONDS_MAX) * 1e6))
    attempt.memory_peak_bytes = max(attempt.memory_peak_bytes, report.memory_peak_bytes)


def known_stop_reason(report: agent_pb2.AttemptReport) -> job_pb2.StopReason.ValueType:
    """Return why an agent stopped a part; unspecified if an agent of another release did not say so."""
    known = report.stop_reason in job_pb2.StopReason.values()
    return report.stop_reason if known else job_pb2.STOP_REASON_UNSPECIFIED


def _record_launch_failure(live: LiveAttempt, node_id: str, cause: job_pb2.LaunchCause.ValueType, reason: str) -> None:
    """Record why a part was not launched; the failure of another part is dropped, since it lost its peer."""
    attempt = live.attempt
    if attempt.HasField("launch_failure"):
        return
    known = cause in job_pb2.LaunchCause.values() and cause != job_pb2.LAUNCH_CAUSE_UNSPECIFIED
    attempt.launch_failure.cause = cause if known else job_pb2.LAUNCH_CAUSE_OTHER
    attempt.launch_failure.reason = attempt.message = reason
    attempt.launch_failure.node_id = node_id
    attempt.ClearField("exit")
    live.evidence.ClearField("output_tail")
