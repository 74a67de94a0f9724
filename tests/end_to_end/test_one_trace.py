"""A job is one trace from submission to exit, across processes and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.end_to_end.meshes import SERVICES, Separate

from cotenant.core.model.lifecycle import Phase

if TYPE_CHECKING:  # it is loaded as a plug-in
    from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan

pytest_plugins = ("tests.support.otlp_receiver",)

BELOW_SUBMIT = ("estimate", "order", "place", "commit", "assign", "launch", "exit")
SERVICE_OF = {
    "submit": "cotenant-queue",
    "estimate": "cotenant-queue",
    "order": "cotenant-queue",
    "place": "cotenant-placement",
    "commit": "cotenant-placement",
    "assign": "cotenant-placement",
    "launch": "cotenant-agent",
    "exit": "cotenant-agent",
}
EXPORT_SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRICS_EXPORTER": "none"}


@pytest.fixture
async def traced(otlp: OtlpReceiver, tmp_path: Path) -> AsyncIterator[Separate]:
    """Separate services that export their spans."""
    services = Separate(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=otlp.endpoint, **EXPORT_SOON)
    await asyncio.to_thread(services.start, *SERVICES)
    yield services
    await asyncio.to_thread(services.close)


async def test_one_job_gives_one_trace(otlp: OtlpReceiver, traced: Separate) -> None:
    submitted = await asyncio.to_thread(traced.cli, "submit", "--gpus", "1", "--cpus", "1", "--wait", "--", "true")
    job_id = submitted.err.split()[1]
    await otlp.wait_for(*SERVICE_OF)
    assert_one_trace(otlp.spans, job_id)


@pytest.mark.deep
async def test_the_trace_goes_on_after_a_restart_of_the_queue(otlp: OtlpReceiver, traced: Separate) -> None:
    await asyncio.to_thread(traced.kill, "agent")  # so that the job waits
    job_id = await asyncio.to_thread(traced.cli.submit, "--gpus", "1", "--cpus", "1", "--", "true")
    await otlp.wait_for("submit")
    await asyncio.to_thread(traced.kill, "queue")
    await asyncio.to_thread(traced.start, "queue", "agent")
    await asyncio.to_thread(traced.client.wait_for, job_id, Phase.SUCCEEDED)
    await otlp.wait_for(*SERVICE_OF)
    assert_one_trace(otlp.spans, job_id)


def assert_one_trace(spans: Sequence[ReceivedSpan], job_id: str) -> None:
    """Check that each stage appears once in one trace, below the submission, from the responsible service."""
    stages = {span.name: span for span in spans if span.attributes.get("job") == job_id}
    assert {name: span.service for name, span in stages.items()} == SERVICE_OF
    submit = stages["submit"]
    assert {span.trace_id for span in stages.values()} == {submit.trace_id}
    assert {name: stages[name].parent_id for name in BELOW_SUBMIT} == dict.fromkeys(BELOW_SUBMIT, submit.span_id)
    begins = [stages[name].start_seconds for name in ("submit", "place", "commit", "assign", "launch", "exit")]
    assert begins == sorted(begins)
    assert not any(span.failed for span in stages.values())
