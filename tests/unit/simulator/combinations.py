"""Random worlds for every combination: a cluster, tenants, a stream of jobs, and a policy of each kind."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from cotenant import plugins
from cotenant.core.model.job import JobKind, Locality, Request, Role, Spread, SpreadBy
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenant
from cotenant.core.policy.options import BadOption, parse, written
from cotenant.plugins import POLICY_GROUPS as GROUPS
from cotenant.simulator import Cluster, Result, Trace, TraceJob, run
from cotenant.simulator.engine import Simulation
from cotenant.simulator.physics.settings import Settings
from cotenant.simulator.prediction_arms import NoisyOracle, NoPrediction, Oracle
from cotenant.simulator.recording.events import Event
from cotenant.simulator.run import simulate
from cotenant.simulator.traces.trace_job import Ended

FOUND = {kind: [plugin for plugin in plugins.discover(group) if plugin.healthy] for kind, group in GROUPS.items()}
OWN_ARMS = (Oracle.name, NoisyOracle.name, NoPrediction.name)
STEPS_MAX = 700
TYPES = ("", "NVIDIA A100", "Tesla T4")
SLOWING = ("none", "all", "bandwidth", "colocation", "cores", "locality,gpu-type")
TENANTS = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Case:
    """A complete simulation: its name determines its course."""

    cluster: Cluster
    jobs: tuple[TraceJob, ...]
    tenants: tuple[Tenant, ...]
    names: Mapping[str, str]
    options: Mapping[str, Mapping[str, str]]
    seed: int

    @property
    def settings(self) -> Settings:
        return parse(Settings, self.options.get("simulator", {}))

    @property
    def combination(self) -> tuple[str, ...]:
        return tuple(self.names[kind] for kind in GROUPS)

    def run(self, look: typing.Callable[[Simulation], bool], recorder: Any = None) -> Result:
        """Simulate it with a check after every event; stops if that is False, or after many steps."""

        def watch(simulation: Simulation) -> bool:
            return look(simulation) and simulation.steps < STEPS_MAX

        with mock.patch.multiple(run, WATCH_EVENTS=1, WATCH_SECONDS=0.0):
            return simulate(
                Trace("drawn", "none", self.jobs),
                self.cluster,
                **self.names,  # type: ignore[arg-type]  # kinds of policies, with names
                tenants=self.tenants,
                options=self.options,
                seed=self.seed,
                watch=watch,
                recorder=recorder,
            )


@dataclass
class Lines:
    """Keeps a recording as it would be written."""

    lines: list[str]

    def record(self, event: Event) -> None:
        self.lines.append(event.as_line())


# Clusters and jobs ----------------------------------------------------------------------------------------------------

SHAPES = st.builds(
    NodeShape,
    gpus=st.sampled_from([4, 8, 2, 1, 0]),
    cores=st.sampled_from([24, 16, 12, 7, 4]),
    memory_bytes=st.sampled_from([0, 64, 40]),
    gpu_type=st.sampled_from(TYPES),
    shareable=st.booleans(),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw a few nodes: with memory on all or on none, in racks, with several memory domains."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    told = draw(st.booleans())
    shapes = [replace(shape, memory_bytes=(shape.memory_bytes or 64) if told else 0) for shape in shapes]
    count = len(shapes)
    racks = draw(st.lists(st.sampled_from(["r0", "r1"]), min_size=count, max_size=count))
    peaks = draw(st.lists(st.sampled_from([0.0, 50e9, 200e9]), min_size=count, max_size=count))
    domains = draw(st.lists(st.sampled_from([1, 2]), min_size=count, max_size=count))
    return Cluster("drawn", tuple(shapes), tuple(racks), tuple(peaks), tuple(domains))


@st.composite
def roles(draw: st.DrawFn, kind: JobKind) -> tuple[Role, ...]:
    """Draw a gang: workers, and sometimes servers or a helper of another size."""
    gpu_type = draw(st.sampled_from(["", "", "", "a100", "t4 | A100"]))
    gpus = 0 if kind is JobKind.CPU else draw(st.sampled_from([1000, 1000, 1000, 2000, 4000, 500, 300]))
    cores = draw(st.sampled_from([None, 1, 2, 4] if gpus else [1, 2, 5, 8]))
    memory = draw(st.sampled_from([0, 0, 5, 20]))
    workers = Role(
        "worker",
        draw(st.sampled_from([1, 1, 2, 3, 5, 8])),
        Request(gpus, cores, memory_bytes=memory, gpu_type=gpu_type),
    )
    if kind is not JobKind.TRAINING or draw(st.integers(0, 3)):
        return (workers,)
    servers = Request(draw(st.sampled_from([0, 0, 1000])), draw(st.sampled_from([1, 2])), memory_bytes=0, gpu_type="")
    return workers, Role("ps", draw(st.integers(1, 2)), servers)


@st.composite
def jobs(draw: st.DrawFn, number: int, at: float, *, many_tenants: bool) -> TraceJob:
    kind = draw(st.sampled_from([JobKind.TRAINING, JobKind.TRAINING, JobKind.TRAINING, JobKind.CPU, JobKind.INFERENCE]))
    work = float(draw(st.sampled_from([1, 10, 60, 300, 900, 2500])))
    deadline = draw(st.sampled_from([None, None, None, 0.5, 3.0, 20.0]))
    some = draw(roles(kind))
    by = draw(st.sampled_from([None, None, None, SpreadBy.NODE, SpreadBy.RACK]))
    least = draw(st.integers(1, max(1, min(3, sum(role.replicas for role in some))))) if by else 0
    places = [None, Locality.ANYWHERE] if least > 1 else [None, None, None, *Locality]
    return TraceJob(
        f"j{number}",
        at,
        work,
        some,
        kind,
        tenant=draw(st.sampled_from(TENANTS)) if many_tenants else "a",
        model=draw(st.sampled_from(["", "resnet50", "bert", "deepspeech2"])),
        name=draw(st.sampled_from(["", "n1", "n2"])),
        user=draw(st.sampled_from(["", "u"])),
        priority=draw(st.sampled_from([0, 0, 0, 100, -100])),
        preemptible=draw(st.integers(0, 4)) > 0,
        deadline_seconds=None if deadline is None else at + deadline * work,
        locality=draw(st.sampled_from(places)),
        spread=Spread(by, least),
        memory_bandwidth_bytes_per_second=draw(st.sampled_from([0.0, 0.0, 20e9, 150e9])),
        ended=draw(st.sampled_from([None, None, None, None, Ended.FAILED, Ended.KILLED])),
    )


@st.composite
def streams(draw: st.DrawFn, *, many_tenants: bool) -> tuple[TraceJob, ...]:
    at, drawn = 0.0, []
    for number in range(draw(st.integers(2, 22))):
        at += draw(st.sampled_from([0.0, 0.0, 1.0, 7.25, 60.0, 400.0])) if number else 0.0
        drawn.append(draw(jobs(number, at, many_tenants=many_tenants)))
    return tuple(drawn)


@st.composite
def families(draw: st.DrawFn) -> tuple[Tenant, ...]:
    """Draw tenants with guarantees and limits, some of which belong to a department."""
    amounts = st.sampled_from([None, None, 0, 1000, 3000, 6000])
    counts = st.sampled_from([None, None, None, 4, 10])
    made: list[Tenant] = []
    for name in draw(st.lists(st.sampled_from(TENANTS), unique=True, max_size=3)):
        quota, cores = draw(amounts), draw(counts)
        limit, most = draw(amounts), draw(counts)
        limit = limit if limit is None or quota is None else max(quota, limit)
        most = most if most is None or cores is None else max(cores, most)
        parent = draw(st.sampled_from(["", "dept"]))
        made.append(Tenant(name, quota, cores, limit, most, draw(st.sampled_from([1.0, 3.0])), parent))
    if any(one.parent for one in made):
        theirs = [one for one in made if one.parent]
        quota = sum(one.quota_gpu_milli or 0 for one in theirs) + draw(st.sampled_from([0, 2000]))
        cores = sum(one.quota_cores or 0 for one in theirs)
        limit = draw(st.sampled_from([None, 4000, 8000]))
        limit = None if limit is None else max(quota, limit)
        made.append(Tenant("dept", quota, cores or None, limit, None))
    return tuple(made)


# Policies -------------------------------------------------------------------------------------------------------------


def declared(plugin: plugins.Plugin) -> Mapping[str, Any]:
    options = getattr(plugin.policy, "Options", None)
    return {} if options is None else typing.get_type_hints(options)


def values(kind: Any, default: str) -> st.SearchStrategy[str] | None:
    """Return other values of an option than its default, by its type; None for an unknown type."""
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from([str(choice) for choice in typing.get_args(kind)])
    if kind is bool:
        return st.sampled_from(["true", "false"])
    if kind is int:
        return st.sampled_from([str(max(0, int(default) + more)) for more in (-1, 0, 1, 3)])
    if kind is float:
        return st.sampled_from([written(float(default) * times) for times in (0.0, 0.1, 0.5, 1.0, 2.0, 10.0)])
    return None


@st.composite
def options_of(draw: st.DrawFn, plugin: plugins.Plugin) -> dict[str, str]:
    """Draw options from a policy's declaration; rejected options are left out."""
    given: dict[str, str] = {}
    if not draw(st.booleans()):
        return given
    for name, kind in declared(plugin).items():
        if (some := values(kind, plugin.options[name])) is None or draw(st.integers(0, 2)):
            continue
        given[name] = draw(some)
        try:
            parse(plugin.policy.Options, given)  # type: ignore[union-attr]  # it has some
        except BadOption:
            del given[name]
    return given


@st.composite
def simulator_options(draw: st.DrawFn) -> dict[str, str]:
    return {
        "cores": draw(st.sampled_from(["none", "auto"])),
        "preemption": draw(st.sampled_from(["policy", "policy", "priority", "never"])),
        "fair_share": draw(st.sampled_from(["off", "tenants"])),
        "run_seconds_min": draw(st.sampled_from(["0", "0", "30", "200"])),
        "reclaim": draw(st.sampled_from(["true", "true", "false"])),
        "reserve_after_seconds": draw(st.sampled_from(["none", "0", "20", "300"])),
        "reservations": draw(st.sampled_from(["1", "2"])),
        "speed": draw(st.sampled_from(SLOWING)),
        "model_default": draw(st.sampled_from(["", "resnet50"])),
        "contention_hardware": draw(st.sampled_from(["enforced", "told", "none"])),
        "contention_interval_seconds": "20",
        "preemption_cost_seconds": draw(st.sampled_from(["0", "5", "model"])),
        "preemption_grace": draw(st.sampled_from(["true", "false"])),
        "checkpoint_interval_seconds": draw(st.sampled_from(["none", "30", "300"])),
        "failures": draw(st.sampled_from(["none", "philly"])),
        "failed_percent": "40",
        "retries": draw(st.sampled_from(["none", "transient", "philly"])),
        "node_mtbf_hours": draw(st.sampled_from(["none", "none", "0.3"])),
        "node_repair_hours": "0.05",
    }


@st.composite
def cases(draw: st.DrawFn, fixed: Mapping[str, str] = MappingProxyType({})) -> Case:
    """Draw a complete simulation; `fixed` names policies by kind."""
    names: dict[str, str] = {}
    options: dict[str, Mapping[str, str]] = {"simulator": draw(simulator_options())}
    for kind, found in FOUND.items():
        arms = [*OWN_ARMS, *OWN_ARMS] if kind == "predictor" else []
        name = fixed.get(kind) or draw(st.sampled_from([*(plugin.name for plugin in found), *arms]))
        slowed = {"all", "bandwidth", "colocation"} & set(options["simulator"].get("speed", "").split(","))
        names[kind] = name if kind != "contention" or slowed else "none"  # otherwise it has no effect, and is rejected
        plugin = next((one for one in found if one.name == names[kind]), None)
        if plugin and (given := draw(options_of(plugin))):
            options[kind] = given
    tenants = draw(families())
    return Case(
        draw(clusters()),
        draw(streams(many_tenants=bool(tenants) or draw(st.booleans()))),
        tenants,
        names,
        options,
        draw(st.integers(0, 2**20)),
    )
