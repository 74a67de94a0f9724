"""One job, one trace: from its submission to the assignment that its agent receives."""

from __future__ import annotations

import pytest
from tests.support.otlp_receiver import OtlpReceiver, otlp
from tests.unit.services.mesh import running

from cotenant import telemetry

__all__ = ["otlp"]  # a fixture

STEPS = ("submit", "estimate", "order", "place", "commit", "assign")


async def test_the_steps_of_a_job_form_one_trace_tree(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp.endpoint)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    telemetry.setup("test")
    try:
        async with running() as mesh:
            await mesh.agent("n1")
            job_id = await mesh.submit(name="traced")
            job = await mesh.reach(job_id, "RUNNING")
            await otlp.wait_for(*STEPS)
    finally:
        telemetry.shutdown()
    submit = otlp.named("submit")
    assert submit.is_named_by(job.trace_parent)
    assert submit.attributes["job_name"] == "traced"
    steps = [otlp.named(name) for name in STEPS[1:]]
    assert {step.trace_id for step in steps} == {submit.trace_id}
    assert {step.parent_id for step in steps} == {submit.span_id}
    assert {step.attributes["job"] for step in steps} == {job_id}
    assert [step.name for step in sorted(steps, key=lambda step: step.end_seconds)] == list(STEPS[1:])
    assert all(step.start_seconds <= step.end_seconds for step in steps)
    assert (steps[-1].attributes["nodes"], steps[3].attributes["epoch"]) == ("n1", job.attempt.epoch)
    call = next(span for span in otlp.spans if span.span_id == submit.parent_id)
    assert call.trace_id == submit.trace_id  # the caller's or the server's, whichever is outermost


async def test_without_tracing_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    def record(name: str, *rest: object, **attributes: object) -> str:
        recorded.append(name)
        return ""

    monkeypatch.setattr(telemetry, "record", record)
    async with running() as mesh:
        await mesh.agent("n1")
        job = await mesh.reach(await mesh.submit(), "RUNNING")
    assert job.trace_parent == ""
    assert recorded == []
