"""Requests as well-behaved clients send them: a random one would be refused at the first field that is checked.

Requests between services refer to existing jobs, attempts and nodes, so that a field that is changed afterwards is
found by its last reader, not only by its first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from google.protobuf.message import Message
from tests.unit.services.mesh import spec
from tests.verification.fuzz.predictor_calls import observation, query

from cotenant.agent.v1 import agent_service_pb2 as agents_pb
from cotenant.agent.v1 import sample_service_pb2 as sample_pb
from cotenant.internal.v1 import observation_service_pb2 as observation_pb
from cotenant.internal.v1 import placement_service_pb2 as placement_pb
from cotenant.v1 import array_service_pb2 as arrays_pb
from cotenant.v1 import job_pb2, resources_pb2, tenant_service_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import predictor_service_pb2 as predictor_pb

STRANGERS = ("x1", "x2", "x3")  # jobs that no queue knows
MASKS = ("spec.priority", "spec.labels", "spec.name", "spec.deadline", "spec.retries_max", "spec.command", "spec.roles")


class ValidRequests:
    """Creates requests. `known` has existing names and may be extended; `inventory` is the inventory of a node."""

    def __init__(self, rng: Random, known: Mapping[str, Sequence[str]], inventory: resources_pb2.Inventory) -> None:
        self._rng, self._known, self._inventory = rng, known, inventory
        made: dict[type[Message], Callable[[], Message]] = {
            jobs_pb.CreateJobRequest: lambda: jobs_pb.CreateJobRequest(spec=self._spec()),
            arrays_pb.CreateArrayRequest: self._array,
            jobs_pb.SimulateJobRequest: lambda: jobs_pb.SimulateJobRequest(spec=self._spec()),
            jobs_pb.UpdateJobRequest: self._update,
            jobs_pb.MoveJobRequest: lambda: jobs_pb.MoveJobRequest(id=self._job(), number=1, reason="x"),
            tenant_service_pb2.CreateTenantRequest: self._tenant,
            tenant_service_pb2.UpdateTenantRequest: self._tenant_changed,
            agents_pb.ConnectRequest: self._connect,
            placement_pb.PlanPlacementRequest: self._plan,
            placement_pb.ForecastStartsRequest: self._forecast,
            placement_pb.StopAttemptsRequest: self._stop,
            placement_pb.ForgetAttemptsRequest: lambda: placement_pb.ForgetAttemptsRequest(attempts=self._victims()),
            placement_pb.AdviseAttemptsRequest: self._advise,
            placement_pb.ResizeReplicasRequest: self._resize,
            predictor_pb.EstimateRequest: lambda: predictor_pb.EstimateRequest(queries=[query(rng)]),
            observation_pb.ObserveRequest: self._observe,
            predictor_pb.PlanProfileRequest: lambda: predictor_pb.PlanProfileRequest(spec=self._spec(), cores_max=4),
            sample_pb.StreamSamplesRequest: self._samples,
        }
        self._made = {kind.DESCRIPTOR.full_name: make for kind, make in made.items()}

    def request(self, kind: Any) -> Message | None:
        """Return a request of a type; None if a random one is as good."""
        make = self._made.get(kind.full_name)
        return make() if make else None

    def _job(self) -> str:
        return self._rng.choice([*self._known["job_id"], *STRANGERS])

    def _spec(self) -> job_pb2.JobSpec:
        gpus = self._rng.choice((0, 0.5, 1, 2))
        kind = job_pb2.JOB_KIND_TRAINING if gpus else job_pb2.JOB_KIND_CPU
        made = spec(gpus=gpus, cores=self._rng.choice((None, 1, 2)), replicas=self._rng.choice((1, 1, 2)), kind=kind)
        if self._rng.random() < 0.2:
            made.roles.add(name="ps", replicas=1).resources.cores = 1
        return made

    def _array(self) -> arrays_pb.CreateArrayRequest:
        request = arrays_pb.CreateArrayRequest(spec=self._spec())
        request.spec.array.ranges.add(first=0, last=self._rng.choice((0, 3)), step=1)
        return request

    def _update(self) -> Message:
        job = job_pb2.Job(id=self._job(), spec=job_pb2.JobSpec(priority=3, name="other", retries_max=2))
        request = jobs_pb.UpdateJobRequest(job=job)
        request.update_mask.paths.append(self._rng.choice(MASKS))
        return request

    def _tenant(self) -> tenant_service_pb2.CreateTenantRequest:
        tenant = tenant_service_pb2.Tenant(
            id=self._rng.choice(("t1", "t2", "t3")), parent=self._rng.choice(("", "t1")), weight=2, limit_gpu_milli=4000
        )
        return tenant_service_pb2.CreateTenantRequest(tenant=tenant)

    def _tenant_changed(self) -> Message:
        request = tenant_service_pb2.UpdateTenantRequest(tenant=self._tenant().tenant)
        request.update_mask.paths.append(self._rng.choice(("weight", "limit_gpu_milli", "parent")))
        return request

    # Agents ----------------------------------------------------------------------------------------------------

    def _connect(self) -> Message:
        if self._rng.random() < 0.6:
            hello = agents_pb.Hello(node_id="n3", inventory=self._inventory, incarnation="x")
            return agents_pb.ConnectRequest(hello=hello)
        request = agents_pb.ConnectRequest(beat=5)
        request.reports.add(job_id=self._job(), number=1, epoch=1, state=job_pb2.ATTEMPT_STATE_RUNNING)
        progress = request.progress.add(job_id=self._job(), number=1).progress
        progress.step, progress.rate_per_second, progress.loss = 100, 2.0, 0.5
        return request

    def _samples(self) -> Message:
        request = sample_pb.StreamSamplesRequest(node_id="n1")
        sample = request.samples.add(node_id="n1", cpu_percent=90.0, memory_used_bytes=1 << 30)
        sample.time.GetCurrentTime()
        sample.window.FromSeconds(1)
        sample.memory_bandwidth_bytes_per_second, sample.memory_bandwidth_peak_bytes_per_second = 5e10, 6e10
        sample.bandwidth_enforced = True
        for job_id in {self._job(), self._job()}:
            sample.attempts.add(
                job_id=job_id, number=1, cores=2, cpu_job=self._rng.random() < 0.5, expected_rate_per_second=4.0
            )
        return request

    # Between services ------------------------------------------------------------------------------------------

    def _candidates(self) -> list[placement_pb.Candidate]:
        made = []
        for _ in range(self._rng.randint(1, 4)):
            candidate = placement_pb.Candidate(
                job_id=self._job(), number=self._rng.choice((1, 1, 2)), spec=self._spec()
            )
            candidate.waited.FromSeconds(self._rng.choice((0, 60, 9000)))
            if self._rng.random() < 0.3:
                candidate.avoided_nodes.append(self._rng.choice(self._known["node"]))
            made.append(candidate)
        return made

    def _victims(self) -> list[placement_pb.Victim]:
        return [placement_pb.Victim(job_id=self._job(), number=1, ahead=1) for _ in range(self._rng.randint(0, 3))]

    def _plan(self) -> Message:
        request = placement_pb.PlanPlacementRequest(
            candidates=self._candidates(), victims=self._victims(), reservations=1, tenants=[self._tenant().tenant]
        )
        request.validate_only, request.strict = self._rng.random() < 0.7, self._rng.random() < 0.3
        request.reserve_after.FromSeconds(30)
        return request

    def _forecast(self) -> Message:
        request = placement_pb.ForecastStartsRequest(
            candidates=self._candidates(), stoppable=self._victims(), draws=self._rng.choice((0, 1, 5)), reservations=1
        )
        request.budget.FromMilliseconds(50)
        request.reserve_after.FromSeconds(30)
        for candidate in request.candidates:
            left = request.runs.add(job_id=candidate.job_id, number=self._rng.choice((0, 1)))
            for one, seconds in ((left.p10, 1), (left.median, 2), (left.p90, 9)):
                one.FromSeconds(seconds)
        return request

    def _stop(self) -> Message:
        return placement_pb.StopAttemptsRequest(attempts=self._victims(), reason=job_pb2.STOP_REASON_PREEMPTED)

    def _resize(self) -> Message:
        resize = placement_pb.ReplicaResize(replicas=2, reason="it is faster")
        resize.next.job_id, resize.next.number = self._job(), 2
        resize.next.spec.CopyFrom(self._spec())
        return placement_pb.ResizeReplicasRequest(resizes=[resize])

    def _advise(self) -> Message:
        advice = placement_pb.Advice(job_id=self._job(), number=1)
        advice.estimate.predictable, advice.estimate.cores_useful, advice.estimate.confidence = True, 2, 0.9
        advice.estimate.remaining.FromSeconds(60)
        if self._rng.random() < 0.5:
            advice.profile.cores.extend((1, 2))
            advice.profile.steps = 5
            advice.profile.budget.FromSeconds(1)
        return placement_pb.AdviseAttemptsRequest(advice=[advice])

    def _observe(self) -> Message:
        seen = observation(self._rng, 1_000_000)
        seen.job_id = self._job()
        return observation_pb.ObserveRequest(observations=[seen])
