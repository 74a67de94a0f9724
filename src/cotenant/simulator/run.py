"""One call from names to a result: loads the policies, replays the trace, and returns the figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cotenant import plugins
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenancy, Tenant
from cotenant.core.model.validation import Violation
from cotenant.core.policy.cluster_view import UsesClusterView
from cotenant.core.policy.options import BadOption, options_by_policy, parse, split_names
from cotenant.core.policy.protocols import ContentionPolicy, CpuAllocator, PlacementPolicy, Predictor, QueuePolicy
from cotenant.core.spelling import did_you_mean, nearest
from cotenant.plugins import POLICY_GROUPS
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.simulator.engine import Simulation
from cotenant.simulator.overlays import Overlays, parse_overlays
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.speeds import NEIGHBOR_MODELS
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import Policies
from cotenant.simulator.prediction_arms import (
    Arm,
    CandidateSource,
    Learner,
    NoisyOracle,
    NoPrediction,
    Oracle,
    Recorded,
    no_candidates,
)
from cotenant.simulator.recording.events import Recorder
from cotenant.simulator.results import Result, result_of
from cotenant.simulator.snapshots import SnapshotState
from cotenant.simulator.traces import Trace, load
from cotenant.simulator.workload import workload

WATCH_SECONDS = 0.1
WATCH_EVENTS = 64
NO_CONTENTION = "none"
ARMS = (Oracle.name, NoisyOracle.name, NoPrediction.name, Recorded.name)

Options = Mapping[str, Mapping[str, str]]
Watch = Callable[[Simulation], bool]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A simulation with its policies, and their names by group."""

    simulation: Simulation
    policies: Policies
    names: Mapping[str, str]


def simulate(
    trace: Trace | Path | str,
    cluster: Cluster | str,
    *,
    queue: QueuePolicy | str = "fifo",
    placement: PlacementPolicy | str = "consolidate",
    allocator: CpuAllocator | str = "requested",
    predictor: Predictor | str = Oracle.name,
    contention: ContentionPolicy | str = NO_CONTENTION,
    tenants: Iterable[Tenant] = (),
    options: Options = MappingProxyType({}),
    seed: int = 0,
    overlay: Overlays | str = "",
    format_name: str | None = None,
    skip_bad_rows: bool = False,
    until_seconds: float = math.inf,
    watch: Watch | None = None,
    recorder: Recorder | None = None,
) -> Result:
    """Replay a trace on a cluster under policies, given by name or as objects.

    `overlay` adds what the trace does not record, such as `models=synergy,tenants=8`. `tenants` have guarantees, limits
    and weights; tenants of the trace that are not among them have neither guarantee nor limit, and weight 1. `options`
    are strings by group (queue, placement, allocator, predictor, simulator) and name. The simulation stops at the first
    event from `until_seconds` on, with jobs still running; `watch` is called about every tenth of a second, and stops
    it by returning False. `recorder` receives every event. The same arguments give the same result, except for
    `wall_seconds`.

    Raises:
        BadTrace, BadCluster, UnknownPolicy, BadOption: the input is invalid; the message says why.
        PolicyFailed: a policy raised an error, or returned an invalid answer.
    """
    began = time.perf_counter()
    place = cluster if isinstance(cluster, Cluster) else parse_cluster(cluster)
    prepared = prepare(
        trace if isinstance(trace, Trace) else partial(load, trace, format_name, skip_bad_rows=skip_bad_rows),
        place,
        queue=queue,
        placement=placement,
        allocator=allocator,
        predictor=predictor,
        contention=contention,
        tenants=tenants,
        options=options,
        seed=seed,
        overlay=overlay,
        recorder=recorder,
    )
    complete = _run(prepared.simulation, until_seconds, watch)
    return result_of(
        prepared.simulation,
        complete=complete,
        wall_seconds=time.perf_counter() - began,
        seed=seed,
        policies=prepared.names,
        options={group: dict(given) for group, given in options.items()},
    )


def prepare(
    trace: Trace | Callable[[], Trace],
    place: Cluster,
    *,
    queue: QueuePolicy | str,
    placement: PlacementPolicy | str,
    allocator: CpuAllocator | str,
    predictor: Predictor | str,
    contention: ContentionPolicy | str,
    tenants: Iterable[Tenant],
    options: Options,
    seed: int,
    overlay: Overlays | str = "",
    recorder: Recorder | None = None,
) -> Prepared:
    """Return a simulation before its first event; a trace that is still to be loaded is loaded after the policies.

    Raises:
        BadTrace, UnknownPolicy, BadOption, PolicyFailed: as in `simulate`.
    """
    settings = settings_of(options)
    policies = Policies(
        _policy_of("queue", queue, options),
        _policy_of("placement", placement, options),
        _policy_of("allocator", allocator, options),
    )
    eliminator = _contention(contention, options, settings)
    jobs = trace if isinstance(trace, Trace) else trace()
    overlays = overlay if isinstance(overlay, Overlays) else parse_overlays([overlay] if overlay else [])
    jobs = workload(jobs, place, overlays, auto_cores=settings.cores == "auto")
    world = World(place, settings, seed, eliminator)
    candidates_of = world.candidate_estimates if isinstance(policies.placement, UsesClusterView) else no_candidates
    with _prefixed("predictor"):
        arm = _arm(predictor, options.get("predictor", {}), jobs, seed, candidates_of, world.shapes)
    simulation = Simulation(
        world.with_notes(jobs),
        place,
        policies,
        arm,
        seed=seed,
        world=world,
        rules=settings.rules,
        tenancy=Tenancy(tenants),
        recorder=recorder,
    )
    names = {
        "queue": policies.queue.name,
        "placement": policies.placement.name,
        "allocator": policies.allocator.name,
        "predictor": predictor if isinstance(predictor, str) else predictor.name,
        "contention": eliminator.name if eliminator else NO_CONTENTION,
    }
    return Prepared(simulation, policies, names)


def _run(simulation: Simulation, until_seconds: float, watch: Watch | None) -> bool:
    looked = time.perf_counter()
    while simulation.now < until_seconds:
        if not simulation.step():
            return True
        if watch and simulation.steps % WATCH_EVENTS == 0 and (now := time.perf_counter()) - looked >= WATCH_SECONDS:
            looked = now
            if not watch(simulation):
                return False
    return False


def settings_of(options: Options) -> Settings:
    """Return the simulator's own options.

    Raises:
        BadOption: names every invalid option.
    """
    groups = [*POLICY_GROUPS, "simulator"]
    if unknown := [
        Violation(group, f"unknown group{did_you_mean(group, groups)}") for group in options if group not in groups
    ]:
        raise BadOption(unknown, dict.fromkeys(groups, "…"))
    with _prefixed("simulator"):
        return parse(Settings, options.get("simulator", {}))


def _policy_of(kind: str, policy: Any, options: Options) -> Any:
    """Return a policy by its name; a policy object already has its options."""
    if isinstance(policy, str):
        with _prefixed(kind):
            return plugins.load(POLICY_GROUPS[kind], policy, options.get(kind, {}))
    if given := options.get(kind):
        raise BadOption(
            (
                Violation(f"{kind}.{name}", "was given for a policy object, which already has its options")
                for name in given
            ),
            {},
        )
    return policy


@contextmanager
def _prefixed(group: str) -> Iterator[None]:
    """Prefix options in errors with their group, as users write them."""
    try:
        yield
    except BadOption as error:
        faults = (Violation(f"{group}.{bad.field}", bad.description) for bad in error.violations)
        raise BadOption(faults, {f"{group}.{name}": default for name, default in error.allowed.items()}) from error


def _arm(
    predictor: Predictor | str,
    options: Mapping[str, str],
    trace: Trace,
    seed: int,
    candidates_of: CandidateSource,
    shapes: Sequence[NodeShape],
) -> Arm:
    """Return the arm of a predictor: one of the simulator's own, an installed one, or an object."""
    jobs = len(trace)
    if not isinstance(predictor, str):
        if options:
            raise BadOption(
                (
                    Violation(name, "was given for a predictor object, which already has its options")
                    for name in options
                ),
                {},
            )
        return Learner([predictor], jobs, shapes)
    name = predictor
    if name == NoisyOracle.name:
        return NoisyOracle(parse(NoisyOracle.Options, options), jobs, seed, candidates_of)
    if name in (Oracle.name, NoPrediction.name, Recorded.name):
        if options:
            raise BadOption((Violation(option, f"unknown option; {name} has none") for option in options), {})
        if name == Recorded.name:
            return Recorded(_snapshot_state(trace), jobs)
        return Oracle(jobs, candidates_of) if name == Oracle.name else NoPrediction()
    names = split_names(name)
    if len(names) > 1 and (own := [one for one in names if one in ARMS]):
        raise BadOption([Violation(own[0], "cannot be combined; a list may only name predictors that learn")], {})
    owned = options_by_policy(names, options)
    try:
        loaded = [plugins.load(POLICY_GROUPS["predictor"], one, owned.get(one, {})) for one in names]
        return Learner(loaded, jobs, shapes)
    except plugins.UnknownPolicy as error:
        name = error.name
        near = nearest(name, ARMS)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; or {', '.join(ARMS)}"
        raise plugins.UnknownPolicy(error.group, name, f"{error}{hint}", (*near, *error.near)) from error


def _snapshot_state(trace: Trace) -> SnapshotState:
    if trace.snapshot_state is None:
        raise plugins.UnknownPolicy(
            POLICY_GROUPS["predictor"],
            Recorded.name,
            "the predictor recorded replays the predictions of a snapshot; this is a trace",
        )
    return trace.snapshot_state


def _contention(policy: ContentionPolicy | str, options: Options, settings: Settings) -> ContentionPolicy | None:
    """Return the contention policy; None for the policy `none`."""
    if policy == NO_CONTENTION:
        if given := options.get("contention"):
            raise BadOption((Violation(f"contention.{key}", f"unknown option; {policy} has none") for key in given), {})
        return None
    made: ContentionPolicy = _policy_of("contention", policy, options)
    if not settings.speeds & NEIGHBOR_MODELS:
        why = f"must include bandwidth or colocation: without them {made.name} has no effect, for jobs never contend"
        raise BadOption([Violation("simulator.speed", why)], {})
    return made
