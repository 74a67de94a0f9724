"""One call from names to a result: find the policies, replay the trace, sum up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cotenant import plugins
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenancy, Tenant
from cotenant.core.model.validation import Violation
from cotenant.core.policy.cluster_view import Sees
from cotenant.core.policy.options import BadOption, by_owner, names_of, parse
from cotenant.core.policy.protocols import ContentionPolicy, CpuAllocator, PlacementPolicy, Predictor, QueuePolicy
from cotenant.core.spelling import did_you_mean, nearest
from cotenant.simulator.clusters.cluster import Cluster, parse_cluster
from cotenant.simulator.engine import Simulation
from cotenant.simulator.overlays import Overlays, parse_overlays
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.physics.speeds import NEIGHBOURLY
from cotenant.simulator.physics.world import World
from cotenant.simulator.policy_set import GROUPS, Policies
from cotenant.simulator.prediction_arms import Arm, Judge, Learner, NoisyOracle, Nothing, Oracle, Recorded, unjudged
from cotenant.simulator.recording.events import Recorder
from cotenant.simulator.results import Result, result_of
from cotenant.simulator.snapshots import Present
from cotenant.simulator.traces import Trace, load
from cotenant.simulator.workload import workload

WATCH_SECONDS = 0.1
WATCH_EVENTS = 64
NO_CONTENTION = "none"
ARMS = (Oracle.name, NoisyOracle.name, Nothing.name, Recorded.name)

Options = Mapping[str, Mapping[str, str]]
Watch = Callable[[Simulation], bool]


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
    """Replay a trace on a cluster under policies, given by name or as they are.

    `overlay` adds what the trace does not tell, such as `models=synergy,tenants=8`. `tenants` have guarantees, limits
    and weights; those of the trace that are not among them have neither guarantee nor limit, and weigh 1. `options`
    are texts by group (queue, placement, allocator, predictor, simulator) and name. It is over at the first event from
    `until_seconds` on, with jobs still running; `watch` is called every tenth of a second or so, and where it returns
    False it is over too. `recorder` is told every event. The same arguments give the same result, but for
    `wall_seconds`.

    Raises:
        BadTrace, BadCluster, UnknownPolicy, BadOption: the input cannot be taken; the message says what is wrong.
        PolicyFailed: a policy raised an error, or answered nonsense.
    """
    began = time.perf_counter()
    settings = settings_of(options)
    policies = Policies(
        _made("queue", queue, options), _made("placement", placement, options), _made("allocator", allocator, options)
    )
    place = cluster if isinstance(cluster, Cluster) else parse_cluster(cluster)
    eliminator = _contention(contention, options, settings)
    jobs = trace if isinstance(trace, Trace) else load(trace, format_name, skip_bad_rows=skip_bad_rows)
    overlays = overlay if isinstance(overlay, Overlays) else parse_overlays([overlay] if overlay else [])
    jobs = workload(jobs, place, overlays, auto_cores=settings.cores == "auto")
    world = World(place, settings, seed, eliminator)
    judge = world.judged if isinstance(policies.placement, Sees) else unjudged
    with _naming("predictor"):
        arm = _arm(predictor, options.get("predictor", {}), jobs, seed, judge, world.shapes)
    simulation = Simulation(
        world.noted(jobs),
        place,
        policies,
        arm,
        seed=seed,
        world=world,
        rules=settings.rules,
        tenancy=Tenancy(tenants),
        recorder=recorder,
    )
    complete = _run(simulation, until_seconds, watch)
    return result_of(
        simulation,
        complete=complete,
        wall_seconds=time.perf_counter() - began,
        seed=seed,
        policies={
            "queue": policies.queue.name,
            "placement": policies.placement.name,
            "allocator": policies.allocator.name,
            "predictor": predictor if isinstance(predictor, str) else predictor.name,
            "contention": eliminator.name if eliminator else NO_CONTENTION,
        },
        options={group: dict(given) for group, given in options.items()},
    )


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
    """Read the simulator's own options.

    Raises:
        BadOption: naming every one that cannot be taken.
    """
    groups = [*GROUPS, "simulator"]
    if unknown := [
        Violation(group, f"is no group{did_you_mean(group, groups)}") for group in options if group not in groups
    ]:
        raise BadOption(unknown, dict.fromkeys(groups, "…"))
    with _naming("simulator"):
        return parse(Settings, options.get("simulator", {}))


def _made(kind: str, policy: Any, options: Options) -> Any:
    """Find a policy by its name; one that is a policy already has its options."""
    if isinstance(policy, str):
        with _naming(kind):
            return plugins.load(GROUPS[kind], policy, options.get(kind, {}))
    if given := options.get(kind):
        raise BadOption(
            (Violation(f"{kind}.{name}", "was given for a policy that is made already") for name in given), {}
        )
    return policy


@contextmanager
def _naming(group: str) -> Iterator[None]:
    """Name options by their group too, as users write them."""
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
    judge: Judge,
    shapes: Sequence[NodeShape],
) -> Arm:
    """Make the arm of a predictor: one of the simulator's own, or one that is installed, or made already."""
    jobs = len(trace)
    if not isinstance(predictor, str):
        if options:
            raise BadOption((Violation(name, "was given for a predictor that is made already") for name in options), {})
        return Learner([predictor], jobs, shapes)
    name = predictor
    if name == NoisyOracle.name:
        return NoisyOracle(parse(NoisyOracle.Options, options), jobs, seed, judge)
    if name in (Oracle.name, Nothing.name, Recorded.name):
        if options:
            raise BadOption((Violation(option, f"is no option; {name} has none") for option in options), {})
        if name == Recorded.name:
            return Recorded(_present(trace), jobs)
        return Oracle(jobs, judge) if name == Oracle.name else Nothing()
    names = names_of(name)
    if len(names) > 1 and (own := [one for one in names if one in ARMS]):
        raise BadOption([Violation(own[0], "stands alone; a list is of predictors that learn")], {})
    owned = by_owner(names, options)
    try:
        return Learner([plugins.load(GROUPS["predictor"], one, owned.get(one, {})) for one in names], jobs, shapes)
    except plugins.UnknownPolicy as error:
        name = error.name
        near = nearest(name, ARMS)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; or {', '.join(ARMS)}"
        raise plugins.UnknownPolicy(error.group, name, f"{error}{hint}", (*near, *error.near)) from error


def _present(trace: Trace) -> Present:
    if trace.present is None:
        raise plugins.UnknownPolicy(
            GROUPS["predictor"], Recorded.name, "the predictor recorded tells what a snapshot holds; this is a trace"
        )
    return trace.present


def _contention(policy: ContentionPolicy | str, options: Options, settings: Settings) -> ContentionPolicy | None:
    """Find the contention policy; None where it is the one that does nothing."""
    if policy == NO_CONTENTION:
        if given := options.get("contention"):
            raise BadOption((Violation(f"contention.{key}", f"is no option; {policy} has none") for key in given), {})
        return None
    made: ContentionPolicy = _made("contention", policy, options)
    if not settings.speeds & NEIGHBOURLY:
        why = f"must name bandwidth or colocation: else jobs do not slow each other down, and {made.name} has no use"
        raise BadOption([Violation("simulator.speed", why)], {})
    return made
