"""A plain gRPC client for calls that a test makes too often to run a command each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.end_to_end.waiting import until

from cotenant.codec import specs
from cotenant.core.model.job import JobSpec
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import (
    JOB_VIEW_FULL,
    CancelJobRequest,
    CreateJobRequest,
    ExplainJobRequest,
    ExplainJobResponse,
    GetJobRequest,
    GetJobResponse,
    ListJobsRequest,
)
from cotenant.v1.job_service_pb2_grpc import JobServiceStub

CALL_SECONDS_MAX = 60.0
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Client:
    """A client of the queue. `find` returns its address and the token for each call."""

    def __init__(self, find: Callable[[], tuple[str, str]]) -> None:
        self._find = find

    def job(self, job_id: str) -> Job:
        """Return a job."""
        with self._channel() as channel:
            answer: GetJobResponse = self._stub(channel).GetJob(GetJobRequest(id=job_id), **self._calling())
            return answer.job

    def explain(self, job_id: str) -> ExplainJobResponse:
        """Return the queue's explanation of a job."""
        with self._channel() as channel:
            answer: ExplainJobResponse = self._stub(channel).ExplainJob(ExplainJobRequest(id=job_id), **self._calling())
            return answer

    def jobs(self) -> list[Job]:
        """Return all jobs."""
        with self._channel() as channel:
            return list(
                self._stub(channel)
                .ListJobs(ListJobsRequest(page_size=1000, view=JOB_VIEW_FULL), **self._calling())
                .jobs
            )

    def submit(self, spec: JobSpec, request_id: str) -> str:
        """Submit a job until it is acknowledged; a retry with the same `request_id` never creates a second job."""
        return until(lambda: self._submitted(spec, request_id), f"answer to {request_id}", seconds=60.0)

    def _submitted(self, spec: JobSpec, request_id: str) -> str:
        try:
            with self._channel() as channel:
                request = CreateJobRequest(spec=specs.spec_to_wire(spec), request_id=request_id)
                return str(self._stub(channel).CreateJob(request, **self._calling()).job.id)
        except grpc.RpcError as error:
            if error.code() not in AWAY:
                raise
            return ""

    def cancel(self, job_id: str) -> None:
        """Cancel a job; a job that has already ended is fine."""
        with self._channel() as channel:
            self._stub(channel).CancelJob(CancelJobRequest(id=job_id), **self._calling())

    def phase(self, job_id: str) -> Phase:
        """Return a job's phase."""
        return specs.PHASES.from_wire(self.job(job_id).phase)

    def serving(self, service: str = "") -> bool:
        """Return whether a service is serving by the health protocol, which needs no token."""
        with self._channel() as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_SECONDS_MAX, wait_for_ready=True)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_for(self, job_id: str, *phases: Phase, seconds: float = 25.0) -> Job:
        """Wait until a job is in one of these phases; fail at once if it ends in another phase."""

        def there() -> Job | None:
            try:
                job = self.job(job_id)
            except grpc.RpcError as error:
                if error.code() not in AWAY:
                    raise
                return None  # it is being restarted
            phase = specs.PHASES.from_wire(job.phase)
            assert phase in phases or phase not in ENDED, f"{job_id} {phase}: {job.phase_reason}"
            return job if phase in phases else None

        job = until(there, f"{job_id} in {phases}", seconds=seconds)
        assert job
        return job

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self._find()[0])

    def _stub(self, channel: grpc.Channel) -> JobServiceStub:
        return JobServiceStub(channel)

    def _calling(self) -> dict[str, Any]:
        return {"metadata": (("authorization", f"Bearer {self._find()[1]}"),), "timeout": CALL_SECONDS_MAX}


def published(state_dir: Path) -> tuple[str, str]:
    """Return the queue's address and token from the state directory."""
    endpoint: str = json.loads((state_dir / "endpoint.json").read_text())["queue"]
    return endpoint, (state_dir / "token").read_text().strip()
