"""Sequences of calls to a real mesh, drawn by Hypothesis: each call finds the effects of earlier ones.

Jobs, arrays and dependencies are submitted, changed, suspended, migrated and cancelled, nodes drained and forgotten,
tenants created and deleted, services killed and restarted, many with invalid values. Each answer is OK or a refusal
with a documented code and a reason; acknowledged jobs stay known until the end, ended jobs stay ended, and a repeated
`request_id` never creates another job. At the end of each sequence all jobs end, the ledger matches the live attempts,
and another job runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import grpc
import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from tests.unit.services.mesh import Mesh, again, running, spec, until
from tests.verification.fuzz.calls import LogFindings, recount
from tests.verification.fuzz.inflater import PATTERNS
from tests.verification.fuzz.loop_lag import LoopLag, is_too_long
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.runner import SETTLED_SHARE, Finding, Outcome, live_bytes

from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import ENDED
from cotenant.services.predictor.api import server as predictor
from cotenant.v1 import array_service_pb2 as arrays_pb
from cotenant.v1 import job_pb2, tenant_service_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import node_service_pb2 as nodes_pb

NAME = "call sequences"
STEPS = 40  # per sequence
AT_ONCE = 20  # sequences, after which Hypothesis' memory of them is dropped
CALL_SECONDS = 20.0
END_SECONDS = 30.0
NODES = ("n1", "n2")
REQUEST_IDS = ("", "", "", "r1", "r2", "r3")
DOCUMENTED = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
KNOWN = {"id": ["n1", "default", "t1", "nobody"], "request_id": ["r1"], "tenant": ["default", "t1"], "role": ["worker"]}
odd_seeds = st.none() | st.none() | st.none() | st.integers(0, 1 << 20)


def run(
    name: str, inputs: int, seed: int | str, directory: Path, watch: Callable[[Outcome], None] = lambda outcome: None
) -> Outcome:
    """Make about this many calls, in sequences of at most `STEPS`."""
    outcome, rng, before = Outcome(name), Random(f"{name} {seed}"), hypothesis.core.global_force_seed
    lag = LoopLag()
    with LogFindings(outcome).listening(), asyncio.Runner() as runner, lag.watching():
        run = Sequence_.run = _Run(runner.get_loop(), outcome, watch, inputs, time.monotonic(), lag)
        while outcome.inputs < inputs and not outcome.findings:
            left = min(AT_ONCE, max(1, (inputs - outcome.inputs) // STEPS))
            hypothesis.core.global_force_seed = rng.getrandbits(64)  # type: ignore[assignment]  # as --hypothesis-seed does
            try:
                run_machine(
                    Sequence_,
                    settings=settings(
                        max_examples=left,
                        stateful_step_count=STEPS,
                        deadline=None,
                        database=None,
                        phases=(hypothesis.Phase.generate,),
                        suppress_health_check=list(HealthCheck),
                        report_multiple_bugs=False,
                        verbosity=hypothesis.Verbosity.quiet,
                    ),
                )
            except Exception as error:
                first, story = run.failure or (error, run.story)  # a sequence that is tried again may go another way
                text = "\n".join([f"{type(first).__name__}: {first}"[:600], *getattr(first, "__notes__", ())])
                outcome.findings.append(Finding(name, text, "\n".join(story).encode()))
            finally:
                hypothesis.core.global_force_seed = before
    outcome.seconds = time.monotonic() - run.begun
    outcome.grown_bytes = live_bytes() - run.settled if run.settled else 0
    return outcome


@dataclass(slots=True)
class _Run:
    """State shared by all sequences of a run."""

    loop: asyncio.AbstractEventLoop
    outcome: Outcome
    watch: Callable[[Outcome], None]
    wanted: int
    begun: float
    lag: LoopLag
    settled: int = 0
    story: list[str] = field(default_factory=list)  # of the current sequence
    failure: tuple[Exception, list[str]] | None = None  # the first, and the story until then

    def fail(self, error: Exception) -> Exception:
        """Keep the first failure with its story; return the error."""
        self.failure = self.failure or (error, [*self.story])
        return error


class Sequence_(RuleBasedStateMachine):  # noqa: N801  # `Sequence` is the collection
    """One sequence on its own mesh."""

    run: ClassVar[_Run]

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.run.story.clear()
        self._running = running(predictor_config=predictor.Config(close_seconds=0.05))
        self.mesh: Mesh = self._do(self._running.__aenter__())
        self.ended: dict[str, str] = {}
        self.acknowledged: dict[str, None] = {}
        self.arrays: set[str] = set()  # of these
        self.by_request: dict[str, tuple[bytes, str]] = {}
        self.restarts = 0

    def _do(self, work: Awaitable[Any]) -> Any:
        return self.run.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        """Start with two nodes."""
        self._do(self.mesh.agent("n1", run_seconds=0.02))
        self._do(self.mesh.agent("n2", gpus=2, run_seconds=0.05))

    def _call(self, method: Any, request: Any, odd: int | None) -> Any:
        """Make a call, perhaps with changed fields; return None for a documented refusal."""
        if odd is not None:
            Drawer(Random(odd), {**KNOWN, "id": [*KNOWN["id"], *self.acknowledged]}).change(request)
        self.run.outcome.inputs += 1
        self.run.story.append(f"{type(request).__name__} {str(request)[:300]!r}")
        self.run.lag.take()  # earlier calls belong to the test
        try:
            return self._do(again(lambda: method(request, timeout=CALL_SECONDS)))
        except grpc.aio.AioRpcError as error:
            self.run.outcome.refused += 1
            problem = errors.from_error(error)
            if error.code() not in DOCUMENTED:
                text = f"{type(request).__name__}: {error.code().name}: {error.details()}"
                raise self.run.fail(AssertionError(text)) from None
            if not problem.reason or not problem.message:
                text = f"{type(request).__name__}: no reason but {problem}"
                raise self.run.fail(AssertionError(text)) from None
            return None
        finally:
            if is_too_long((step := self.run.lag.take()).seconds):
                where = f"{step.seconds * 1000:.0f} ms of CPU time in {step.what}"
                raise self.run.fail(AssertionError(f"{type(request).__name__} held the loop: {where}"))

    # Jobs ------------------------------------------------------------------------------------------------------

    @rule(
        target=jobs,
        gpus=st.sampled_from([0, 0.5, 1, 2, 4, 100]),
        replicas=st.sampled_from([1, 1, 2, 3]),
        fields=st.fixed_dictionaries(
            {},
            optional={
                "priority": st.sampled_from([-5, 0, 7]),
                "tenant": st.sampled_from(["default", "t1", "nobody"]),
                "retries_max": st.sampled_from([0, 1]),
                "preemptible": st.booleans(),
            },
        ),
        array=st.none() | st.none() | st.tuples(st.integers(-1, 3), st.integers(0, 6), st.integers(0, 2)),
        after=st.lists(jobs, max_size=2) | st.just(["nobody"]),
        request_id=st.sampled_from(REQUEST_IDS),
        odd=odd_seeds,
    )
    def submit(
        self,
        gpus: float,
        replicas: int,
        fields: dict[str, Any],
        array: tuple[int, int, int] | None,
        after: Sequence[str],
        request_id: str,
        odd: int | None,
    ) -> Any:
        """Submit a job or an array."""
        kind = job_pb2.JOB_KIND_CPU if not gpus else job_pb2.JOB_KIND_TRAINING
        wanted = spec(gpus=gpus, cores=1, replicas=replicas, kind=kind, **fields)
        for job_id in after:
            wanted.dependencies.add(id=job_id, condition=1 + len(job_id) % 2)
        if array:
            first, last, running_max = array
            wanted.array.ranges.add(first=first, last=last, step=1)
            wanted.array.running_max = running_max
            return self._submit_array(arrays_pb.CreateArrayRequest(spec=wanted, request_id=request_id), odd)
        request = jobs_pb.CreateJobRequest(spec=wanted, request_id=request_id)
        answer = self._call(self.mesh.jobs.CreateJob, request, odd)
        if answer is None or request.validate_only:
            return multiple()
        self._same(request, answer.job.id)
        self.acknowledged[answer.job.id] = None
        return answer.job.id

    def _submit_array(self, request: arrays_pb.CreateArrayRequest, odd: int | None) -> Any:
        """Submit an array; return its first job."""
        answer = self._call(self.mesh.arrays.CreateArray, request, odd)
        if answer is None or request.validate_only:
            return multiple()
        first = f"{answer.array.id}_{answer.array.spec.array.ranges[0].first}"
        self._same(request, first)
        self.acknowledged[first] = None
        return first

    def _same(self, request: jobs_pb.CreateJobRequest | arrays_pb.CreateArrayRequest, job_id: str) -> None:
        """Check that a repeated request is answered with the job of the first."""
        if request.request_id:
            written = request.SerializeToString(deterministic=True)
            first = self.by_request.setdefault(request.request_id, (written, job_id))
            if first != (written, job_id):
                text = f"request {request.request_id!r} created {first[1]}, and then {job_id}"
                raise self.run.fail(AssertionError(text))

    @rule(
        job=jobs | st.just("nobody"),
        how=st.sampled_from(["CancelJob", "SuspendJob", "ResumeJob", "ExplainJob"]),
        request_id=st.sampled_from(("", "", "c1", "c2")),
        odd=odd_seeds,
    )
    def change(self, job: str, how: str, request_id: str, odd: int | None) -> None:
        """Change or query a job."""
        request = getattr(jobs_pb, f"{how}Request")(id=job)
        if how != "ExplainJob":
            request.request_id = request_id
        self._call(getattr(self.mesh.jobs, how), request, odd)

    @rule(
        job=jobs | st.just("nobody_0"),
        how=st.sampled_from(["GetArray", "CancelArray", "SuspendArray", "ResumeArray"]),
        request_id=st.sampled_from(("", "", "c1", "c3")),
        whole=st.sampled_from([True, True, False]),
        odd=odd_seeds,
    )
    def change_array(self, job: str, how: str, request_id: str, whole: bool, odd: int | None) -> None:
        """Change or query the array of a job; or what is none."""
        request = getattr(arrays_pb, f"{how}Request")(id=job.partition("_")[0] if whole else job)
        if how != "GetArray":
            request.request_id = request_id
        self._call(getattr(self.mesh.arrays, how), request, odd)

    @rule(
        job=jobs,
        name=st.sampled_from(["priority", "labels", "name", "deadline", "retries_max", "command"]),
        odd=odd_seeds,
    )
    def update(self, job: str, name: str, odd: int | None) -> None:
        """Update fields of a job."""
        request = jobs_pb.UpdateJobRequest(job=job_pb2.Job(id=job, spec=job_pb2.JobSpec(priority=3, name="other")))
        request.update_mask.paths.append(f"spec.{name}")
        self._call(self.mesh.jobs.UpdateJob, request, odd)

    @rule(job=jobs, number=st.integers(0, 3), odd=odd_seeds)
    def move(self, job: str, number: int, odd: int | None) -> None:
        """Migrate an attempt."""
        self._call(self.mesh.jobs.MoveJob, jobs_pb.MoveJobRequest(id=job, number=number, reason="x"), odd)

    @rule(
        target=jobs,
        last_and_size=st.sampled_from([(99, 15_000), (99, 100), (999, 500)]),  # more would hide memory leaks
        ranges=st.sampled_from([1, 2, 500]),
    )
    def submit_wide(self, last_and_size: tuple[int, int], ranges: int) -> Any:
        """Submit a wide array of large jobs, with overlapping ranges."""
        last, size = last_and_size
        made = spec(gpus=1, cores=1, kind=job_pb2.JOB_KIND_TRAINING)
        made.environment["FILL"] = "x" * size
        for number in range(ranges):
            made.array.ranges.add(first=min(number, last), last=last, step=1)
        answer = self._call(self.mesh.arrays.CreateArray, arrays_pb.CreateArrayRequest(spec=made), None)
        if answer is None:
            return multiple()
        self.acknowledged[answer.array.id] = None
        self.arrays.add(answer.array.id)
        return multiple()

    @rule(depth=st.sampled_from([5, 30]), width=st.sampled_from([1, 3]))
    def submit_chain(self, depth: int, width: int) -> None:
        """Submit layers of jobs that depend on the previous layer."""
        before: list[str] = []
        for _ in range(depth):
            request = jobs_pb.CreateJobRequest(spec=spec(gpus=0, cores=1, kind=job_pb2.JOB_KIND_CPU))
            for job_id in before[-width:]:
                request.spec.dependencies.add(id=job_id, condition=2)
            if (answer := self._call(self.mesh.jobs.CreateJob, request, None)) is None:
                return
            before.append(answer.job.id)
            self.acknowledged[answer.job.id] = None

    @rule(pattern=st.sampled_from(PATTERNS), count=st.sampled_from([1, 39, 100, 101]), nasty=st.booleans())
    def what_if_many(self, pattern: str, count: int, nasty: bool) -> None:
        """Ask when very many jobs would run, with patterns that are slow to compile."""
        request = jobs_pb.SimulateJobRequest(spec=spec(gpus=1))
        for number in range(count):
            one = request.more.add()
            one.CopyFrom(spec(gpus=1))
            one.progress.regex = pattern[:1024] if nasty else rf"step (\d+) of {number}"
        self._call(self.mesh.jobs.SimulateJob, request, None)

    @rule(single=st.booleans(), size=st.sampled_from([0, 1000]), node=st.sampled_from(["", "n1"]))
    def list_many(self, single: bool, size: int, node: str) -> None:
        """List all jobs, and all arrays."""
        wanted = jobs_pb.JobFilter(node_id=node, standalone_only=single)
        self._call(self.mesh.jobs.ListJobs, jobs_pb.ListJobsRequest(page_size=size, filter=wanted), None)
        self._call(self.mesh.arrays.ListArrays, arrays_pb.ListArraysRequest(page_size=size, filter=wanted), None)
        self._call(self.mesh.jobs.SummarizeFailures, jobs_pb.SummarizeFailuresRequest(), None)
        self._call(self.mesh.jobs.SummarizeUsage, jobs_pb.SummarizeUsageRequest(by=jobs_pb.USAGE_GROUP_DAY), None)

    @rule(odd=odd_seeds)
    def what_if(self, odd: int | None) -> None:
        """Ask when a job would run."""
        self._call(self.mesh.jobs.SimulateJob, jobs_pb.SimulateJobRequest(spec=spec(gpus=1)), odd)

    @rule(job=jobs)
    def look(self, job: str) -> None:
        """Check that acknowledged jobs exist, and ended ones stay ended."""
        answer = self._call(self.mesh.jobs.GetJob, jobs_pb.GetJobRequest(id=job), None)
        if answer is None:
            raise self.run.fail(AssertionError(f"{job} was acknowledged, and is lost"))
        phase = specs.PHASES.from_wire(answer.job.phase)
        if self.ended.setdefault(job, phase) != phase and self.ended[job] in ENDED:
            raise self.run.fail(AssertionError(f"{job} had ended as {self.ended[job]}, and is {phase}"))
        self.ended[job] = phase

    @rule(odd=odd_seeds)
    def list_jobs(self, odd: int | None) -> None:
        """List a page."""
        self._call(self.mesh.jobs.ListJobs, jobs_pb.ListJobsRequest(page_size=3), odd)

    # The cluster, tenants, services ----------------------------------------------------------------------------

    @rule(
        node=st.sampled_from([*NODES, "nobody"]),
        how=st.sampled_from(["DrainNode", "CordonNode", "UncordonNode", "UncordonNode", "GetNode"]),
        odd=odd_seeds,
    )
    def nodes(self, node: str, how: str, odd: int | None) -> None:
        """Close and open nodes."""
        self._call(getattr(self.mesh.nodes, how), getattr(nodes_pb, f"{how}Request")(id=node), odd)

    @rule(how=st.sampled_from(["Create", "Update", "Delete"]), quota=st.integers(0, 3), odd=odd_seeds)
    def tenants(self, how: str, quota: int, odd: int | None) -> None:
        """Create and delete a tenant."""
        request = getattr(tenant_service_pb2, f"{how}TenantRequest")()
        if how == "Delete":
            request.id = "t1"
        else:
            request.tenant.id, request.tenant.quota_gpu_milli = "t1", 1000 * quota
        self._call(getattr(self.mesh.tenants, f"{how}Tenant"), request, odd)

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.03]))
    def pass_time(self, seconds: float) -> None:
        """Wait for the services."""
        self._do(asyncio.sleep(seconds))

    @precondition(lambda self: self.restarts < 2)
    @rule(service=st.sampled_from(["queue", "placement", "predictor"]))
    def restart(self, service: str) -> None:
        """Kill and restart a service."""
        self.restarts += 1
        self.run.story.append(f"restart {service}")
        self._do(self.mesh.restart(service))

    # The end ---------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """End all work, and check that a job runs afterwards."""
        try:
            self._do(asyncio.wait_for(self._end(), END_SECONDS * 2))
        except Exception as error:
            raise self.run.fail(error) from None
        finally:
            self._do(self._running.__aexit__(None, None, None))
            del self.mesh, self._running  # memory that a sequence leaves is measured without its mesh
        run, outcome = self.run, self.run.outcome
        outcome.seconds = time.monotonic() - run.begun
        if not run.settled and outcome.inputs >= run.wanted * SETTLED_SHARE:
            run.settled = live_bytes()
        run.watch(outcome)

    def _cancel(self, one: str) -> Any:
        """Cancel an acknowledged job or array."""
        if one in self.arrays:
            return self.mesh.arrays.CancelArray(arrays_pb.CancelArrayRequest(id=one))
        return self.mesh.jobs.CancelJob(jobs_pb.CancelJobRequest(id=one))

    async def _end(self) -> None:
        for node in NODES:
            await again(lambda node=node: self.mesh.nodes.UncordonNode(nodes_pb.UncordonNodeRequest(id=node)))  # type: ignore[misc]  # binds the loop's own
        for one in self.acknowledged:
            try:
                await again(lambda one=one: self._cancel(one))  # type: ignore[misc]  # likewise
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise AssertionError(f"{one} cannot be cancelled: {error.details()}") from None
        async with asyncio.timeout(END_SECONDS):
            await again(self.mesh.all_ended)
            last = await again(lambda: self.mesh.submit(gpus=1, priority=1000))
            await self.mesh.reach(last, "SUCCEEDED")
            cluster = self.mesh.parts["placement"].service.cluster
            await until(lambda: all(live.state.ended for live in cluster.attempts.values()))
        for wrong in recount(self.mesh):
            raise AssertionError(f"the ledger: {wrong}")
