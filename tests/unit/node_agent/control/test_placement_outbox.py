"""What waits for the next message to placement."""

from __future__ import annotations

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.placement_outbox import ANSWERS_MAX, PlacementOutbox
from cotenant.v1 import resources_pb2


def filled() -> PlacementOutbox:
    outbox = PlacementOutbox()
    outbox.report(agent_pb2.AttemptReport(job_id="a"))
    outbox.report_resize(agent_pb2.ResizeReport(job_id="b"))
    outbox.report_profile(agent_pb2.ProfileReport(job_id="c"))
    outbox.report_inventory(resources_pb2.Inventory(rack="r"))
    for step in (1, 2):
        progress = agent_pb2.ProgressReport(job_id="d", number=1)
        progress.progress.step = step
        outbox.report_progress(progress)
    return outbox


def test_a_message_has_everything_once_and_the_latest_progress_of_each_attempt() -> None:
    outbox = filled()
    assert outbox
    assert outbox.filled.is_set()
    message = outbox.take()
    assert [message.reports[0].job_id, message.resized[0].job_id, message.profiled[0].job_id] == ["a", "b", "c"]
    assert message.inventory.rack == "r"
    assert [report.progress.step for report in message.progress] == [2]
    assert not outbox
    assert outbox.take() == agent_pb2.ConnectRequest()


def test_a_new_stream_gets_only_the_answers_that_its_hello_does_not_repeat() -> None:
    outbox = filled()
    outbox.keep_answers()
    assert outbox.take() == agent_pb2.ConnectRequest(
        resized=[agent_pb2.ResizeReport(job_id="b")], profiled=[agent_pb2.ProfileReport(job_id="c")]
    )


def test_answers_are_bounded_while_there_is_no_stream() -> None:
    outbox = PlacementOutbox()
    for epoch in range(ANSWERS_MAX + 5):
        outbox.report_resize(agent_pb2.ResizeReport(job_id="a", epoch=epoch))
    outbox.keep_answers()
    assert [report.epoch for report in outbox.take().resized] == list(range(5, ANSWERS_MAX + 5))
