"""The predictor's servicer, and its composition from parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cotenant import plugins, telemetry
from cotenant.codec import errors
from cotenant.codec.errors import Violation
from cotenant.core.model import estimate as estimate_module
from cotenant.core.model.validation import CORES_MAX, name_error
from cotenant.core.policy.protocols import Forgets
from cotenant.core.prediction.chain import Chain, by_own_rate
from cotenant.core.prediction.drift import BOUNDS, Bounds
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.internal.v1 import observation_service_pb2_grpc
from cotenant.rpc.paging import PageRequest, page_of_messages
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Host, Server
from cotenant.security.identity import caller, check_tenant, resolve_tenant
from cotenant.services.predictor import codec
from cotenant.services.predictor.api import advice
from cotenant.services.predictor.api.estimate_encoding import EstimateWriter
from cotenant.services.predictor.api.profile_view import profile_of
from cotenant.services.predictor.models.failure_log import FailureLog
from cotenant.services.predictor.models.job_classes import JobClasses
from cotenant.services.predictor.models.model_store import ModelFollower, ModelStore, Persistent
from cotenant.services.predictor.models.observation_intake import ObservationIntake, rejection
from cotenant.services.predictor.models.training import Trainer
from cotenant.services.predictor.profiling.profile_planner import RULES, ProfilePlanner, ProfileRules
from cotenant.services.predictor.profiling.profile_store import ProfileStore
from cotenant.store.port import Store
from cotenant.v1 import advice_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as pb
from cotenant.v1 import predictor_service_pb2_grpc as pb_grpc

SERVICE = "cotenant.v1.PredictorService"
OBSERVATION_SERVICE = "cotenant.internal.v1.ObservationService"
GROUP = "cotenant.predictors"
PROFILE_RECORDS = "measured-cores"  # the name of Measured's records in the store
KINDS = "kinds"  # the name of those of Kinds
PROFILES_MAX = 100  # per page: each takes a few milliseconds
BATCH_MAX = 10_000
OBSERVATIONS_PER_YIELD = 50  # observations processed before yielding to other calls: a few milliseconds
SLICE_CANDIDATES_MAX = 2_000  # of all queries in a slice
NOT_RESTORED = "the saved models have not been read from the store yet"
STALE_CONFIDENCE_FACTOR = 0.5  # factor on confidence while a profile is stale
SLICE = 200  # queries answered before yielding to other calls: about 5 ms; models prefer larger batches

FITS = 2  # per predictor before yielding to other calls: about 5 ms
BUSY_POLL_SECONDS = 0.005  # pause while calls are being answered

queries_answered = telemetry.counter("cotenant.predictor.queries", "{query}", "Jobs estimated")
observations_taken = telemetry.counter("cotenant.predictor.observations", "{observation}", "Observations accepted")
observations_rejected = telemetry.counter("cotenant.predictor.rejected", "{observation}", "Observations rejected")


@dataclass(frozen=True, slots=True)
class Config:
    """The predictors in order of precedence, with their options, and how often they train and are saved.

    `profiles` limits profiling of running jobs; `bounds` defines when a profile is stale.
    """

    predictors: Sequence[str] = ("history",)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by predictor
    save_seconds: float = 0.5  # also the delay of followers
    train_seconds: float = 10.0  # between checks for due trainings
    close_seconds: float = 5.0
    profiles: ProfileRules = RULES
    bounds: Bounds = BOUNDS
    follow: str = ""  # the HOST:PORT that takes observations; this predictor then only reads what that one saves


class PredictorServicer(pb_grpc.PredictorServiceServicer, observation_service_pb2_grpc.ObservationServiceServicer):
    """Estimates how fast and how long jobs will run."""

    def __init__(
        self,
        chain: Chain,
        profile_store: ProfileStore,
        model_store: ModelStore,
        failures: FailureLog,
        profiles: ProfileRules = RULES,
        job_classes: JobClasses | None = None,
        follows: str = "",
    ) -> None:
        self.chain, self._profile_store, self._model_store, self._failures = chain, profile_store, model_store, failures
        self._job_classes = job_classes or JobClasses()
        self._profile_planner = ProfilePlanner(profile_store, profiles)
        self._follows = follows
        self._calls_in_flight = 0  # calls of Estimate under way
        self._seen = asyncio.Event()
        self._intake = ObservationIntake()

    async def Estimate(self, request: pb.EstimateRequest, context: Any) -> pb.EstimateResponse:
        """Return an estimate for each query; an invalid query gets one that contains the reason."""
        _require_batch("queries", len(request.queries))
        for tenant in {query.spec.tenant for query in request.queries}:
            check_tenant(resolve_tenant(tenant))
        if caller().tenants is not None:
            for query in request.queries:
                query.spec.tenant = resolve_tenant(query.spec.tenant)
        response = pb.EstimateResponse()
        reader, writer = codec.QueryReader(), EstimateWriter()
        self._calls_in_flight += 1
        try:
            for queries in _slices(request.queries):
                messages = [response.estimates.add(job_id=query.job_id) for query in queries]
                writer.write(self._estimate(queries, reader), queries, messages)
                await asyncio.sleep(0)
        finally:
            self._calls_in_flight -= 1
        self._failures.flush()
        queries_answered.add(len(request.queries))
        return response

    async def Observe(self, request: observation_pb2.ObserveRequest, context: Any) -> observation_pb2.ObserveResponse:
        """Record observations one by one; return the rejected ones and the jobs that should be profiled."""
        _require_batch("observations", len(request.observations))
        if self._follows:
            why = f"this predictor is read-only; send observations to {self._follows}"
            raise errors.failed_precondition("READS_ONLY", why, observes=self._follows)
        if not self._model_store.restored:
            raise errors.unavailable(NOT_RESTORED)
        rejected = []
        wanted: dict[str, None] = {}
        for index, message in enumerate(request.observations):
            if index % OBSERVATIONS_PER_YIELD == OBSERVATIONS_PER_YIELD - 1:
                await asyncio.sleep(0)  # yield to other calls
            try:
                if self._observe(message):
                    wanted[message.job_id] = None
            except ValueError as error:
                rejected.append(rejection(index, message, error))
        self._failures.flush()
        self._seen.set()
        accepted = len(request.observations) - len(rejected)
        observations_taken.add(accepted)
        observations_rejected.add(len(rejected))
        return observation_pb2.ObserveResponse(accepted=accepted, rejected=rejected, profile_wanted=wanted)

    async def PlanProfile(self, request: pb.PlanProfileRequest, context: Any) -> pb.PlanProfileResponse:
        """Return the core counts at which a job should be measured next, given the rates of its class so far."""
        violations = []
        if not 1 <= request.cores_max <= CORES_MAX:
            violations.append(Violation("cores_max", f"must be from 1 to {CORES_MAX}, not {request.cores_max}"))
        if problem := name_error(request.gpu_type):
            violations.append(Violation("gpu_type", problem))
        try:
            codec.job_class_of(request.spec)
        except ValueError as error:
            violations.append(Violation("spec", str(error)))
        if violations:
            raise errors.invalid(violations)
        gpu_type = request.gpu_type or codec.gpu_type_of(request.spec)
        order = self._profile_planner.plan(request.spec, gpu_type, request.cores_max, time.monotonic())
        response = pb.PlanProfileResponse(cores=order.cores, steps=order.steps, reason=order.reason)
        response.budget.FromMilliseconds(int(order.budget_seconds * 1000))
        return response

    async def ListProfiles(self, request: pb.ListProfilesRequest, context: Any) -> pb.ListProfilesResponse:
        """Return a page of profiles of job classes, yielding to other calls after each class."""
        if not self._model_store.restored:
            raise errors.unavailable(NOT_RESTORED)
        ids = self._job_classes.find(request.user, request.model)
        scope = f"profiles/{request.user}/{request.model}"
        asked = PageRequest.read(request.page_size, request.page_token, scope, PROFILES_MAX)

        def message(id: str) -> pb.Profile | None:
            for kind, seen_seconds in self._job_classes.of([id]):
                return profile_of(kind, seen_seconds, self._profile_store, self.chain, self._failures.add)
            return None

        page = await page_of_messages(ids, message, asked)
        self._failures.flush()
        return pb.ListProfilesResponse(profiles=page.items, next_page_token=page.next_token, total_size=len(ids))

    async def prepare(self) -> None:
        """Fit models in advance after new observations, between other calls, until cancelled."""
        while True:
            await self._seen.wait()
            self._seen.clear()
            while self._calls_in_flight or self.chain.prepare(FITS):  # noqa: ASYNC110  # yields to other calls often
                await asyncio.sleep(BUSY_POLL_SECONDS if self._calls_in_flight else 0)
            self._failures.flush()

    def _estimate(
        self, messages: Sequence[pb.EstimateQuery], reader: codec.QueryReader
    ) -> Sequence[estimate_module.Estimate]:
        if not self._model_store.restored:
            return [estimate_module.Estimate(source=f"predictor: {NOT_RESTORED}")] * len(messages)
        refused: dict[int, estimate_module.Estimate] = {}
        queries = []
        for place, message in enumerate(messages):
            try:
                queries.append(reader.read(message))
            except ValueError as error:
                refused[place] = estimate_module.Estimate(source=f"predictor: invalid query: {error}")
        answers = map(self._discount_if_stale, queries, self.chain.estimate_many(queries))
        return [refused.get(place) or next(answers) for place in range(len(messages))]

    def _discount_if_stale(
        self, query: estimate_module.Query, estimate: estimate_module.Estimate
    ) -> estimate_module.Estimate:
        """Return the estimate with lower confidence if the profile of its job class is stale."""
        kind = query.user, query.model, query.name, query.gpu_milli, query.replicas
        why = self._profile_store.stale(kind, query.gpu_type, query.phase)
        return _discounted(estimate, why) if why else estimate

    def _observe(self, message: observation_pb2.Observation) -> bool:
        """Record an observation; return True if its job should be profiled."""
        observation = self._intake.take(message)
        kind = codec.job_class_of(message.spec)
        self._job_classes.record(kind, codec.seconds_of(message.time))
        seen = self._profile_store.record(kind, observation, profiled=message.profiled)
        if seen.void:
            self._profile_planner.invalidate(kind, observation.allocation.gpu_type)
            for predictor in self.chain.predictors.values():
                if isinstance(predictor, Forgets):
                    predictor.forget_rates(observation)
        for earlier in seen.learnt:
            if earlier is not observation:
                self.chain.observe(replace(earlier, loss=None, batch_size=None, batch_seconds=None))
        if observation not in seen.learnt:  # its rate is withheld, everything else is used
            observation = replace(observation, rate_per_second=None, window_seconds=0.0)
        self.chain.observe(observation)
        return self._profile_planner.should_profile(message, observation, time.monotonic())


class RunningPredictor:
    """A served predictor and its background tasks."""

    def __init__(self, model_store: ModelStore, trainer: Trainer, servicer: PredictorServicer, config: Config) -> None:
        self.model_store, self._config = model_store, config
        self._tasks = (
            asyncio.create_task(model_store.run(config.save_seconds), name="predictor-keeper"),
            asyncio.create_task(trainer.run(config.train_seconds), name="predictor-trainer"),
            asyncio.create_task(servicer.prepare(), name="predictor-preparer"),
        )

    async def close(self) -> None:
        """Save what was learned last. The store must still be open, and the server stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.model_store.save_all(self._config.close_seconds)


async def start(server: Server, store: Store, policies: PolicyServicer, config: Config = Config()) -> RunningPredictor:
    """Add a predictor to a server that has not started yet.

    It is NOT_SERVING until the saved models have been restored, and while the store is unavailable; it answers
    estimates nevertheless.

    Raises:
        UnknownPolicy, BadOption, ValueError: see `chain_of`.
    """
    predicting = make(server, store, config, config.follow)
    policies.use(GROUP, *config.predictors, options=config.options)
    return predicting


def chain_of(config: Config, failures: FailureLog) -> Chain:
    """Return the chain of configured predictors.

    Raises:
        UnknownPolicy: a predictor is not installed, or broken.
        BadOption: an option is unknown to its predictor.
        ValueError: there is no predictor, a duplicate, or options for one that is not used.
    """
    if stray := sorted(set(config.options) - set(config.predictors)):
        raise ValueError(f"options for {stray[0]!r}, which is not among the predictors in use")
    return Chain([plugins.load(GROUP, name, config.options.get(name, {})) for name in config.predictors], failures.add)


def make(host: Host, store: Store, config: Config, follows: str) -> RunningPredictor:
    """Return a predictor that serves on a host: a leader that takes observations, or a follower.

    Raises:
        UnknownPolicy, BadOption, ValueError: see `chain_of`.
    """
    failures = FailureLog()
    chain = chain_of(config, failures)
    profile_store, job_classes = ProfileStore(bounds=config.bounds), JobClasses()
    kept: dict[str, Persistent] = {**chain.predictors, PROFILE_RECORDS: profile_store, KINDS: job_classes}

    def set_serving(ready: bool) -> None:
        for service in (SERVICE, OBSERVATION_SERVICE, advice.SERVICE):
            host.set_serving(service, ready)

    kind = ModelFollower if follows else ModelStore
    model_store = kind(store, kept, set_serving)
    servicer = PredictorServicer(chain, profile_store, model_store, failures, config.profiles, job_classes, follows)
    host.add(pb_grpc.add_PredictorServiceServicer_to_server, servicer, SERVICE)
    host.add(observation_service_pb2_grpc.add_ObservationServiceServicer_to_server, servicer, OBSERVATION_SERVICE)
    host.add(advice_service_pb2_grpc.add_AdviceServiceServicer_to_server, advice.AdviceServicer(), advice.SERVICE)
    set_serving(False)
    learners = {} if follows else chain.predictors  # only the leader trains models
    return RunningPredictor(model_store, Trainer(learners, lambda: model_store.restored), servicer, config)


def _discounted(estimate: estimate_module.Estimate, why: str) -> estimate_module.Estimate:
    """Return an estimate with lower confidence and a note that its profile is stale.

    A remaining time by the job's own rate does not depend on the profile.
    """
    factor = 1.0 if by_own_rate(estimate) else STALE_CONFIDENCE_FACTOR
    return replace(
        estimate,
        confidence=estimate.confidence * factor,
        cores_useful_confidence=estimate.cores_useful_confidence * STALE_CONFIDENCE_FACTOR,
        candidates=tuple(
            [replace(one, confidence=one.confidence * STALE_CONFIDENCE_FACTOR) for one in estimate.candidates]
        ),
        source=f"{estimate.source}; its profile is stale: {why}",
    )


def _require_batch(field: str, size: int) -> None:
    if size > BATCH_MAX:
        raise errors.invalid([Violation(field, f"has {size} entries; the maximum is {BATCH_MAX}")])


def _slices(queries: Sequence[pb.EstimateQuery]) -> Iterator[Sequence[pb.EstimateQuery]]:
    """Yield slices of at most `SLICE` queries and about `SLICE_CANDIDATES_MAX` candidates, which take similar time."""
    begin, candidates = 0, 0
    for end, query in enumerate(queries):
        if end > begin and (end - begin >= SLICE or candidates >= SLICE_CANDIDATES_MAX):
            yield queries[begin:end]
            begin, candidates = end, 0
        candidates += len(query.candidates)
    if begin < len(queries):
        yield queries[begin:]
