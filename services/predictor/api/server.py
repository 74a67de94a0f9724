"""The predictor's side of the wire, and how it is composed from its parts."""

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
from cotenant.core.model.validation import CORES_MAX, bad_name
from cotenant.core.policy.protocols import Forgets
from cotenant.core.prediction.chain import Chain
from cotenant.core.prediction.drift import BOUNDS, Bounds
from cotenant.rpc.paging import page_of
from cotenant.rpc.policy_service import PolicyServicer
from cotenant.rpc.server import Host, Server
from cotenant.security.identity import caller, check_tenant, meant_tenant
from cotenant.services.predictor import codec
from cotenant.services.predictor.api.estimate_encoding import Writer
from cotenant.services.predictor.api.profile_view import profile_of
from cotenant.services.predictor.models.failure_log import Failures
from cotenant.services.predictor.models.job_classes import Kinds
from cotenant.services.predictor.models.model_store import Follower, Keeper, Kept
from cotenant.services.predictor.models.observation_intake import Intake, rejection
from cotenant.services.predictor.models.training import Trainer
from cotenant.services.predictor.profiling.profile_planner import RULES, Profiler, ProfileRules
from cotenant.services.predictor.profiling.profile_store import Measured
from cotenant.store.port import Store
from cotenant.v1 import predictor_service_pb2 as pb
from cotenant.v1 import predictor_service_pb2_grpc as pb_grpc

SERVICE = "cotenant.v1.PredictorService"
GROUP = "cotenant.predictors"
MEASURED = "measured-cores"  # the name of Measured's records in the store
KINDS = "kinds"  # the name of those of Kinds
PROFILES_MAX = 100  # of one page: each takes some milliseconds
BATCH_MAX = 10_000
OBSERVED_AT_ONCE = 50  # observations between two chances for other calls: a few milliseconds
SLICE_CANDIDATES = 2_000  # of the queries of a slice together
NOT_RESTORED = "what was learnt before has not been read from the store yet"
STALE_TRUST = 0.5  # by this factor confidence is lower while a profile is stale
SLICE = 200  # queries between two chances for other calls: about 5 ms; models prefer more at once

FITS = 2  # of each predictor, between two chances for other calls: about 5 ms
BESIDE_SECONDS = 0.005  # to wait while somebody is being answered

queries_answered = telemetry.counter("cotenant.predictor.queries", "{query}", "Jobs estimated")
observations_taken = telemetry.counter("cotenant.predictor.observations", "{observation}", "Observations taken in")
observations_rejected = telemetry.counter("cotenant.predictor.rejected", "{observation}", "Observations rejected")


@dataclass(frozen=True, slots=True)
class Config:
    """Which predictors are asked, in which order, with which options; how often they learn, and that is kept.

    `profiles` and `bounds` say what may be measured of running jobs, and from when on a profile no longer holds.
    """

    predictors: Sequence[str] = ("history",)
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by predictor
    keep_seconds: float = 0.5  # and so the time after which replicas that read have heard
    train_seconds: float = 10.0  # between two looks at whether there is a lesson
    close_seconds: float = 5.0
    profiles: ProfileRules = RULES
    bounds: Bounds = BOUNDS
    follow: str = ""  # who takes observations, as HOST:PORT; this one then only reads what that one writes


class PredictorServicer(pb_grpc.PredictorServiceServicer):
    """Tells how fast and how long jobs will run."""

    def __init__(
        self,
        chain: Chain,
        measured: Measured,
        keeper: Keeper,
        failures: Failures,
        profiles: ProfileRules = RULES,
        kinds: Kinds | None = None,
        follows: str = "",
    ) -> None:
        self.chain, self._measured, self._keeper, self._failures = chain, measured, keeper, failures
        self._kinds = kinds or Kinds()
        self._profiler = Profiler(measured, profiles)
        self._follows = follows
        self._asked = 0  # calls of Estimate under way
        self._seen = asyncio.Event()
        self._intake = Intake()

    async def Estimate(self, request: pb.EstimateRequest, context: Any) -> pb.EstimateResponse:
        """Estimate each job. A query that cannot be taken is answered with why; the others are not held up."""
        _require_batch("queries", len(request.queries))
        for tenant in {query.spec.tenant for query in request.queries}:
            check_tenant(meant_tenant(tenant))
        if caller().tenants is not None:
            for query in request.queries:
                query.spec.tenant = meant_tenant(query.spec.tenant)
        response = pb.EstimateResponse()
        reader, writer = codec.Queries(), Writer()
        self._asked += 1
        try:
            for queries in _slices(request.queries):
                messages = [response.estimates.add(job_id=query.job_id) for query in queries]
                writer.write(self._estimate(queries, reader), queries, messages)
                await asyncio.sleep(0)
        finally:
            self._asked -= 1
        self._failures.tell()
        queries_answered.add(len(request.queries))
        return response

    async def Observe(self, request: pb.ObserveRequest, context: Any) -> pb.ObserveResponse:
        """Take in what was seen, each observation on its own, and say whose rates should be measured now."""
        _require_batch("observations", len(request.observations))
        if self._follows:
            why = f"this predictor only reads; observations are taken by the one at {self._follows}"
            raise errors.failed_precondition("READS_ONLY", why, observes=self._follows)
        if not self._keeper.restored:
            raise errors.unavailable(NOT_RESTORED)
        rejected = []
        wanted: dict[str, None] = {}
        for index, message in enumerate(request.observations):
            if index % OBSERVED_AT_ONCE == OBSERVED_AT_ONCE - 1:
                await asyncio.sleep(0)  # others have their turn
            try:
                if self._observe(message):
                    wanted[message.job_id] = None
            except ValueError as error:
                rejected.append(rejection(index, message, error))
        self._failures.tell()
        self._seen.set()
        accepted = len(request.observations) - len(rejected)
        observations_taken.add(accepted)
        observations_rejected.add(len(rejected))
        return pb.ObserveResponse(accepted=accepted, rejected=rejected, profile_wanted=wanted)

    async def PlanProfile(self, request: pb.PlanProfileRequest, context: Any) -> pb.PlanProfileResponse:
        """Say at which core counts a job should be measured next, from the rates of its kind so far."""
        wrong = []
        if not 1 <= request.cores_max <= CORES_MAX:
            wrong.append(Violation("cores_max", f"must be from 1 to {CORES_MAX}, not {request.cores_max}"))
        if problem := bad_name(request.gpu_type):
            wrong.append(Violation("gpu_type", problem))
        try:
            codec.kind_of(request.spec)
        except ValueError as error:
            wrong.append(Violation("spec", str(error)))
        if wrong:
            raise errors.invalid(wrong)
        gpu_type = request.gpu_type or codec.gpu_type_of(request.spec)
        order = self._profiler.plan(request.spec, gpu_type, request.cores_max, time.monotonic())
        response = pb.PlanProfileResponse(cores=order.cores, steps=order.steps, reason=order.reason)
        response.budget.FromMilliseconds(int(order.budget_seconds * 1000))
        return response

    async def ListProfiles(self, request: pb.ListProfilesRequest, context: Any) -> pb.ListProfilesResponse:
        """Tell what is known of kinds of jobs, a page at a time; other calls get their turn after each kind."""
        if not self._keeper.restored:
            raise errors.unavailable(NOT_RESTORED)
        ids = self._kinds.find(request.user, request.model)
        size, scope = min(request.page_size or PROFILES_MAX, PROFILES_MAX), f"{request.user}/{request.model}"
        page, token = page_of(ids, size, request.page_token, scope=scope)
        response = pb.ListProfilesResponse(next_page_token=token, total_size=len(ids))
        for kind, seen_seconds in list(self._kinds.of(page)):
            response.profiles.append(profile_of(kind, seen_seconds, self._measured, self.chain, self._failures.add))
            await asyncio.sleep(0)
        self._failures.tell()
        return response

    async def prepare(self) -> None:
        """Fit what the next questions need as soon as something was seen, between other calls, until cancelled."""
        while True:
            await self._seen.wait()
            self._seen.clear()
            while self._asked or self.chain.prepare(FITS):  # noqa: ASYNC110  # others are to have their turn, often
                await asyncio.sleep(BESIDE_SECONDS if self._asked else 0)
            self._failures.tell()

    def _estimate(
        self, messages: Sequence[pb.EstimateQuery], reader: codec.Queries
    ) -> Sequence[estimate_module.Estimate]:
        if not self._keeper.restored:
            return [estimate_module.Estimate(source=f"predictor: {NOT_RESTORED}")] * len(messages)
        refused: dict[int, estimate_module.Estimate] = {}
        queries = []
        for place, message in enumerate(messages):
            try:
                queries.append(reader.read(message))
            except ValueError as error:
                refused[place] = estimate_module.Estimate(source=f"predictor: the query cannot be taken: {error}")
        answers = map(self._if_stale, queries, self.chain.estimate_many(queries))
        return [refused.get(place) or next(answers) for place in range(len(messages))]

    def _if_stale(self, query: estimate_module.Query, estimate: estimate_module.Estimate) -> estimate_module.Estimate:
        """Be less sure of a job whose kind runs at other rates than were measured."""
        kind = query.user, query.model, query.name, query.gpu_milli, query.replicas
        why = self._measured.stale(kind, query.gpu_type, query.phase)
        return _doubted(estimate, why) if why else estimate

    def _observe(self, message: pb.Observation) -> bool:
        """Take an observation in; True where its job should be profiled."""
        observation = self._intake.take(message)
        kind = codec.kind_of(message.spec)
        self._kinds.saw(kind, codec.seconds_of(message.time))
        seen = self._measured.saw(kind, observation, profiled=message.profiled)
        if seen.void:
            self._profiler.void(kind, observation.allocation.gpu_type)
            for predictor in self.chain.predictors.values():
                if isinstance(predictor, Forgets):
                    predictor.forget_rates(observation)
        for earlier in seen.learnt:
            if earlier is not observation:
                self.chain.observe(replace(earlier, loss=None, batch_size=None, batch_seconds=None))
        if observation not in seen.learnt:  # its rate is held back, all else that it tells is not
            observation = replace(observation, rate_per_second=None, window_seconds=0.0)
        self.chain.observe(observation)
        return self._profiler.wanted(message, observation, time.monotonic())


class Predicting:
    """A predictor that is being served."""

    def __init__(self, keeper: Keeper, trainer: Trainer, servicer: PredictorServicer, config: Config) -> None:
        self.keeper, self._config = keeper, config
        self._tasks = (
            asyncio.create_task(keeper.run(config.keep_seconds), name="predictor-keeper"),
            asyncio.create_task(trainer.run(config.train_seconds), name="predictor-trainer"),
            asyncio.create_task(servicer.prepare(), name="predictor-preparer"),
        )

    async def close(self) -> None:
        """Keep what was learnt last. The store must still be open, the server stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self.keeper.keep_all(self._config.close_seconds)


async def start(server: Server, store: Store, policies: PolicyServicer, config: Config = Config()) -> Predicting:
    """Add a predictor to a server that has not started yet.

    It is NOT_SERVING until what was learnt before has been restored, and whenever the store is away; estimates are
    given all the same.

    Raises:
        UnknownPolicy, BadOption, ValueError: see `chain_of`.
    """
    predicting = make(server, store, config, config.follow)
    policies.use(GROUP, *config.predictors, options=config.options)
    return predicting


def chain_of(config: Config, failures: Failures) -> Chain:
    """Make the predictors.

    Raises:
        UnknownPolicy: a predictor is not installed, or broken.
        BadOption: a predictor does not take an option.
        ValueError: no predictor, one twice, or options for one that is not used.
    """
    if stray := sorted(set(config.options) - set(config.predictors)):
        raise ValueError(f"options are given for {stray[0]!r}, which is not among the predictors in use")
    return Chain([plugins.load(GROUP, name, config.options.get(name, {})) for name in config.predictors], failures.add)


def make(host: Host, store: Store, config: Config, follows: str) -> Predicting:
    """Make a predictor that serves on a host: one that observes, or one that follows who does.

    Raises:
        UnknownPolicy, BadOption, ValueError: see `chain_of`.
    """
    failures = Failures()
    chain = chain_of(config, failures)
    measured, kinds = Measured(bounds=config.bounds), Kinds()
    kept: dict[str, Kept] = {**chain.predictors, MEASURED: measured, KINDS: kinds}
    kind = Follower if follows else Keeper
    keeper = kind(store, kept, lambda ready: host.set_serving(SERVICE, ready))
    servicer = PredictorServicer(chain, measured, keeper, failures, config.profiles, kinds, follows)
    host.add(pb_grpc.add_PredictorServiceServicer_to_server, servicer, SERVICE)
    host.set_serving(SERVICE, False)
    learners = {} if follows else chain.predictors  # a model is learnt once, by the one that observes
    return Predicting(keeper, Trainer(learners, lambda: keeper.restored), servicer, config)


def _doubted(estimate: estimate_module.Estimate, why: str) -> estimate_module.Estimate:
    """Say that a profile is stale, and be less sure because of it."""
    return replace(
        estimate,
        confidence=estimate.confidence * STALE_TRUST,
        cores_useful_confidence=estimate.cores_useful_confidence * STALE_TRUST,
        candidates=tuple([replace(one, confidence=one.confidence * STALE_TRUST) for one in estimate.candidates]),
        source=f"{estimate.source}; its profile is stale: {why}",
    )


def _require_batch(field: str, size: int) -> None:
    if size > BATCH_MAX:
        raise errors.invalid([Violation(field, f"has {size} entries; {BATCH_MAX} are taken at most")])


def _slices(queries: Sequence[pb.EstimateQuery]) -> Iterator[Sequence[pb.EstimateQuery]]:
    """Cut queries into slices of `SLICE` at most, and of about as many candidates as take the same time."""
    begin, candidates = 0, 0
    for end, query in enumerate(queries):
        if end > begin and (end - begin >= SLICE or candidates >= SLICE_CANDIDATES):
            yield queries[begin:end]
            begin, candidates = end, 0
        candidates += len(query.candidates)
    if begin < len(queries):
        yield queries[begin:]
