"""What placement records of agents' reports."""

from __future__ import annotations

import pytest

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.core.failures.classifier import SIGNS_MAX, TAIL_LENGTH_MAX
from cotenant.core.model.lifecycle import AttemptState
from cotenant.services.placement.cluster.attempt_reports import SIGN_LENGTH_MAX, record_end
from cotenant.services.placement.cluster.live_records import LiveAttempt
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2


@pytest.fixture
def live() -> LiveAttempt:
    return LiveAttempt(records_pb2.StoredAttempt(attempt=job_pb2.Attempt(job_id="a", number=1)), ())


def failed(tail: str, *signs: str) -> agent_pb2.AttemptReport:
    return agent_pb2.AttemptReport(exit=job_pb2.ExitStatus(code=1), output_tail=tail, signs=signs)


def test_evidence_is_of_the_first_part_that_failed(live: LiveAttempt) -> None:
    record_end(live, "n1", AttemptState.FAILED, failed("the cause", "xid 79"))
    record_end(live, "n2", AttemptState.FAILED, failed("lost its peer", "xid 31"))
    assert live.attempt.exit.node_id == "n1"
    assert (live.evidence.output_tail, list(live.evidence.signs)) == ("the cause", ["xid 79"])


def test_evidence_is_cut(live: LiveAttempt) -> None:
    record_end(live, "n1", AttemptState.FAILED, failed("x" * 10_000 + "end", *["y" * 10_000] * 100))
    assert len(live.evidence.output_tail) == TAIL_LENGTH_MAX
    assert live.evidence.output_tail.endswith("end")
    assert [len(sign) for sign in live.evidence.signs] == [SIGN_LENGTH_MAX] * SIGNS_MAX


def test_a_launch_failure_replaces_another_parts_failure(live: LiveAttempt) -> None:
    record_end(live, "n1", AttemptState.FAILED, failed("lost its peer"))
    record_end(live, "n2", AttemptState.NOT_LAUNCHED, agent_pb2.AttemptReport(message="no GPU"))
    record_end(live, "n3", AttemptState.FAILED, failed("lost its peer"))
    assert live.attempt.launch_failure.node_id == "n2"
    assert not live.evidence.output_tail


def test_a_repeated_report_adds_the_evidence_that_a_restored_record_lacks(live: LiveAttempt) -> None:
    """As when `cotenant store accept-regression` restored the record from the public attempt."""
    live.attempt.exit.node_id, live.attempt.exit.code = "n1", 1
    tails = []
    for node_id, tail in (("n2", "lost its peer"), ("n1", "the cause")):
        record_end(live, node_id, AttemptState.FAILED, failed(tail))
        tails.append(live.evidence.output_tail)
    assert tails == ["", "the cause"]


def test_an_attempts_cpu_time_is_that_of_all_parts_and_its_memory_that_of_the_largest(live: LiveAttempt) -> None:
    for node_id, cpu_seconds, system_seconds, memory_bytes in (
        ("n1", 3.5, 1.0, 300),
        ("n2", 1.5, 0.25, 700),
        ("n3", -9.0, -1.0, -5),
    ):
        report = agent_pb2.AttemptReport(memory_peak_bytes=memory_bytes)
        report.cpu_time.FromMilliseconds(int(cpu_seconds * 1000))
        report.system_time.FromMilliseconds(int(system_seconds * 1000))
        record_end(live, node_id, AttemptState.SUCCEEDED, report)
    assert live.attempt.cpu_time.ToMilliseconds() == 5000
    assert live.attempt.system_time.ToMilliseconds() == 1250
    assert live.attempt.memory_peak_bytes == 700
