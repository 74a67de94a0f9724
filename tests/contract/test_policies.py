"""Contract suite over every installed policy: each keeps the guarantees of its group."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.support.worlds import World, emptied, gangs, picture, replicas_of, rng, shapes, specs, tables, worlds

from cotenant import plugins
from cotenant.core.model.estimate import UNKNOWN, Candidate, Estimate, Observation, Query
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec, Qos, Request, Role
from cotenant.core.model.job_table import Capacity, Jobs, JobTable
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.placement.unschedulable import never_fits, room_on
from cotenant.core.policy import options as declared_options
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.protocols import (
    CpuAllocator,
    EndedJob,
    FixedWhileWaiting,
    Learns,
    Order,
    PlacementPolicy,
    Predictor,
    QueuePolicy,
)
from cotenant.core.prediction.core_curve import Point
from cotenant.core.scheduling.cycle import take
from cotenant.core.scheduling.ordering import rank
from cotenant.core.sizing.resize import ResizableJob, Resizes, leading_role, resizable

DECIDING = tuple(group for group in plugins.GROUPS if group != "cotenant.runtimes")
FORBIDDEN = {
    *("asyncio", "concurrent", "datetime", "grpc", "multiprocessing", "os", "random", "secrets", "socket", "sqlite3"),
    *("structlog", "subprocess", "threading", "time", "uuid"),
}
NOW = 10_000.0


def installed(*groups: str) -> pytest.MarkDecorator:
    """Parametrize a test with every policy of some groups."""
    found = [plugin for group in groups for plugin in plugins.discover(group)]
    names = [f"{plugin.group.removeprefix('cotenant.')}:{plugin.name}" for plugin in found]
    return pytest.mark.parametrize("plugin", found, ids=names)


@installed(*DECIDING)
def test_an_installed_policy_implements_its_protocol(plugin: plugins.Plugin) -> None:
    assert plugin.healthy, plugin.error
    assert plugin.policy is not None
    assert (plugin.policy.name, plugin.policy.api_version) == (plugin.name, 1)  # type: ignore[attr-defined]  # asked here


@installed(*DECIDING)
def test_a_policy_documents_its_idea_its_source_and_an_example(plugin: plugins.Plugin) -> None:
    if plugin.package != plugins.OURS:
        pytest.skip("how a policy of another package is documented is its own matter")
    told = inspect.getdoc(plugin.policy) or ""
    cites = re.search(r"\b(19|20)\d\d\b.*\[[PDCR]\]", told, re.DOTALL)
    assert cites or "baseline" in told, "neither a paper with its tag nor a baseline"
    assert re.search(r"^>>> ", told, re.MULTILINE), "no doctest"


@installed(*DECIDING)
def test_a_policy_imports_no_clock_no_randomness_and_no_io(plugin: plugins.Plugin) -> None:
    assert plugin.policy is not None
    tree = ast.parse(Path(inspect.getfile(plugin.policy)).read_text(encoding="utf-8"))
    names = set(imported(tree))
    assert not {name.split(".")[0] for name in names} & FORBIDDEN
    assert all(name.startswith(("cotenant.core", "cotenant.policies")) for name in names if name.startswith("cotenant"))
    drawn = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random"
    ]
    assert {node.attr for node in drawn} <= {"Generator"}, "chance comes in as an argument"


def imported(tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module or ""


@installed(*DECIDING)
def test_options_round_trip(plugin: plugins.Plugin) -> None:
    declared = getattr(plugin.policy, "Options", None)
    if declared is None:
        return
    told = inspect.getdoc(declared) or ""
    for field in dataclasses.fields(declared):
        assert re.search(rf"^{field.name}: \S", told, re.MULTILINE), f"{field.name} is not told"
    assert declared_options.parse(declared, plugin.options) == declared()


@installed(*DECIDING)
def test_an_unknown_option_is_named(plugin: plugins.Plugin) -> None:
    with pytest.raises(plugins.BadOption, match="no_such_option"):
        plugin.make({"no_such_option": "1"})


def unreadable(plugin: plugins.Plugin) -> list[str]:
    """Return the names of the numeric options."""
    return [name for name, default in plugin.options.items() if re.fullmatch(r"[\d.,]+", default)]


@installed(*DECIDING)
def test_all_invalid_options_are_named_at_once(plugin: plugins.Plugin) -> None:
    if numbers := unreadable(plugin):
        with pytest.raises(plugins.BadOption) as caught:
            plugin.make(dict.fromkeys(numbers, "many"))
        assert {violation.field for violation in caught.value.violations} == set(numbers)


NUMBER = r"(\d[\d.e+-]*)"
LEAST = rf"must be (?:{NUMBER} or more|from {NUMBER} to|(?:above|more than) {NUMBER})"
MOST = rf"(?:to|at most|below) {NUMBER}(?:,|$)"
MAY_BE_INFINITE = {  # times without end, and gains that nothing reaches
    ("locality", name) for name in ("server_seconds", "rack_seconds", "dedicated_share", "settled_seconds", "gain_min")
} | {("multi-array", "trial_seconds"), ("multi-array", "cpu_wait_seconds")}


def out_of_range(options: Any, name: str, value: float) -> str:
    """Return why an option cannot have a value, whatever the other options are; "" if it can."""
    changed = dataclasses.replace(options, **{name: value})
    told = [one.description for one in changed.check() if one.field == name]
    for other, figure in dataclasses.asdict(changed).items():
        told = [re.sub(rf"\b{other}\b", f"{figure:g}", text) if other in text else text for text in told]
    return next((text for text in told if re.search(LEAST, text)), "")


@installed(*DECIDING)
def test_the_ends_of_an_options_range_are_those_that_its_violation_names(plugin: plugins.Plugin) -> None:
    options = plugin.policy.Options() if unreadable(plugin) else None  # type: ignore[union-attr]  # it has options
    for name in unreadable(plugin):
        kind = type(getattr(options, name))
        if kind is tuple:
            continue
        if kind is float:
            is_endless = (plugin.name, name) in MAY_BE_INFINITE
            assert bool(out_of_range(options, name, math.inf)) != is_endless, name
        for pattern, outwards in ((LEAST, -math.inf), (MOST, math.inf)):
            if not (named := re.search(pattern, out_of_range(options, name, kind(math.copysign(1e12, outwards))))):
                assert outwards > 0, f"{name} has no least value"
                continue
            end = kind(float(next(filter(None, named.groups()))))
            beyond, within = (
                math.nextafter(end, towards) if kind is float else end + int(math.copysign(1, towards))
                for towards in (outwards, -outwards)
            )
            is_outside = bool(re.match("must be (above|more)|below", named[0]))
            told = [bool(out_of_range(options, name, value)) for value in (beyond, end, within)]
            assert told == [True, is_outside, False], (name, end)


ends = st.builds(
    lambda gpus, cores, seconds: EndedJob(1000 * gpus, cores, max(1, gpus), seconds, gpus * seconds),
    st.integers(0, 8),
    st.integers(0, 16),
    st.floats(0, 1e7),
)
histories = st.lists(ends, max_size=8) | st.lists(ends, min_size=1, max_size=4).map(lambda some: some * 100)


def taught(plugin: plugins.Plugin, history: list[EndedJob]) -> QueuePolicy:
    """Make a queue policy, with few or many past jobs if it learns."""
    policy: QueuePolicy = plugin.make()
    if isinstance(policy, Learns):
        for ended in history:
            policy.learn(ended)
    return policy


@installed("cotenant.queue_policies")
@settings(max_examples=examples(60))
@given(tables(), histories, st.data())
def test_every_job_gets_a_finite_score_in_any_row_order(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], data: st.DataObject
) -> None:
    policy = taught(plugin, history)
    jobs, before = table.jobs(NOW), table.jobs(NOW)
    order = policy.order(jobs, NOW)
    assert len(order.level) == len(order.score) == len(jobs)
    assert np.isfinite(order.score).all()
    assert order.valid_seconds > 1e-4, "a wake-up that never comes to an end"
    assert order.given_up is None or not (order.given_up & jobs.running).any(), "who runs is not given up"
    for column in dataclasses.fields(Jobs):
        np.testing.assert_array_equal(getattr(jobs, column.name), getattr(before, column.name))
    shuffle = np.array(data.draw(st.permutations(range(len(jobs)))), dtype=np.int64)
    whole = ("capacity", "by_arrival", "needs", "past_use")  # not columns of jobs
    columns = [field.name for field in dataclasses.fields(Jobs) if field.name not in whole]
    needs = tuple(column[shuffle] for column in jobs.needs)
    shuffled = Jobs(**{name: getattr(jobs, name)[shuffle] for name in columns}, needs=needs, capacity=jobs.capacity)
    again = taught(plugin, history).order(shuffled, NOW)
    np.testing.assert_array_equal(again.level, order.level[shuffle])
    np.testing.assert_array_equal(again.score, order.score[shuffle])
    assert again.valid_seconds == order.valid_seconds
    for marks, shuffled_marks in ((order.over_share, again.over_share), (order.given_up, again.given_up)):
        assert (marks is None) == (shuffled_marks is None)
        assert marks is None or marks[shuffle].tolist() == shuffled_marks.tolist()  # type: ignore[union-attr]  # as above


@installed("cotenant.queue_policies")
@settings(max_examples=examples(60))
@given(tables(), histories, st.floats(0, 1))
def test_while_an_order_is_valid_no_waiting_job_gains_on_any_other(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], share: float
) -> None:
    """Running jobs may rise, such as those that near their end; where none is ever stopped, they may also fall."""
    policy = taught(plugin, history)
    order = policy.order(table.jobs(NOW), NOW)
    later = NOW + share * 0.999 * min(order.valid_seconds, 1e7)
    again = policy.order(table.jobs(later), later)
    waiting = ~table.jobs(NOW).running
    compared = waiting | policy.preemptive

    def overtaken(now: float, order: Order) -> np.ndarray:
        """Which waiting jobs (columns) come after which jobs (rows)."""
        place = np.argsort(rank(table.jobs(now), order, running_first=policy.running_first))
        return (place[:, None] < place[None, :])[compared][:, waiting]

    assert not (overtaken(NOW, order) & ~overtaken(later, again)).any()


@installed("cotenant.queue_policies")
@settings(max_examples=examples(60))
@given(tables(), histories, st.data())
def test_an_order_that_is_fixed_while_jobs_wait_depends_on_no_other_job_and_no_moment(
    plugin: plugins.Plugin, table: JobTable, history: list[EndedJob], data: st.DataObject
) -> None:
    policy = taught(plugin, history)
    fixed = capability_of(policy, FixedWhileWaiting)
    if fixed is None or not fixed.fixed_while_waiting:
        return
    jobs = table.jobs(NOW)
    order = policy.order(jobs, NOW)
    assert order.over_share is order.given_up is None
    picked = data.draw(st.lists(st.sampled_from(range(len(jobs))), unique=True)) if len(jobs) else []
    rows = np.array(picked, dtype=np.int64)
    some = policy.order(table.jobs(NOW, rows), NOW)
    np.testing.assert_array_equal(some.level, order.level[rows])
    np.testing.assert_array_equal(some.score, order.score[rows])
    assert policy.order(table.jobs(NOW, np.flatnonzero(jobs.running)), NOW).valid_seconds == order.valid_seconds
    waiting = np.flatnonzero(~jobs.running)
    later = NOW + data.draw(st.floats(0, 1e7))
    again = policy.order(table.jobs(later), later)
    np.testing.assert_array_equal(again.level[waiting], order.level[waiting])
    np.testing.assert_array_equal(again.score[waiting], order.score[waiting])


@installed("cotenant.queue_policies")
@settings(max_examples=examples(60))
@given(tables(), histories)
def test_a_running_job_is_chosen_again(plugin: plugins.Plugin, table: JobTable, history: list[EndedJob]) -> None:
    """Else jobs would stop each other at every event, though nothing that matters to them has changed."""
    policy = taught(plugin, history)

    def chosen() -> set[str]:
        jobs, left, found = table.jobs(NOW), np.array(Capacity(5000, 12, 8)), set[str]()
        for row in rank(jobs, policy.order(jobs, NOW), running_first=policy.running_first):
            need = np.array([column[row] for column in jobs.needs])
            if (need <= left).all():
                left = left - need
                found.add(table.ids[row])
        return found

    first = chosen()
    for job_id in table.ids:
        if table.running(job_id) and job_id not in first:
            table.stop(job_id, NOW)
        elif job_id in first and not table.running(job_id):
            table.start(job_id, NOW)
    assert not policy.preemptive or chosen() == first


@installed("cotenant.queue_policies")
def test_a_number_out_of_range_is_named(plugin: plugins.Plugin) -> None:
    for name in unreadable(plugin):
        for text in ("-1", "nan"):
            with pytest.raises(plugins.BadOption) as caught:
                plugin.make({name: text})
            assert [violation.field for violation in caught.value.violations] == [name]


@installed("cotenant.queue_policies")
def test_an_empty_queue_has_an_order(plugin: plugins.Plugin) -> None:
    order = plugin.make().order(JobTable().jobs(NOW), NOW)
    assert (len(order.level), len(order.score)) == (0, 0)


@installed("cotenant.placement_policies")
@settings(max_examples=examples(150))
@given(worlds(), gangs(), st.integers(0, 2**32))
def test_an_offer_is_complete_free_and_deterministic(
    plugin: plugins.Plugin, world: World, gang: Gang, seed: int
) -> None:
    policy: PlacementPolicy = plugin.make()
    ledger, before = world.ledger, picture(world.ledger)
    answer = policy.place(gang, ledger, rng(seed))
    assert picture(ledger) == before
    assert plugin.make().place(gang, ledger, rng(seed)) == answer
    if isinstance(answer, Refusal):
        assert answer.detail
        return
    assert replicas_of(answer, gang) == [part.replicas for part in gang.parts]
    for share in answer:
        demand = gang.parts[share.part].demand
        assert ledger.open[share.node]
        assert not demand.gpu_milli or ledger.of_type(demand.gpu_type)[share.node]
    with ledger.rolled_back():
        take(ledger, gang, answer)


@installed("cotenant.placement_policies")
@settings(max_examples=examples(150))
@given(worlds(), gangs(roles_max=1))
def test_a_refused_gang_starts_without_its_obstacle(plugin: plugins.Plugin, world: World, gang: Gang) -> None:
    policy: PlacementPolicy = plugin.make()
    refusal = policy.place(gang, world.ledger, rng())
    if not isinstance(refusal, Refusal):
        return
    idle = emptied(world.ledger)
    if refusal.code is Code.NO_NODES:
        idle.open[:] = True
    starts = isinstance(policy.place(gang, idle, rng()), tuple)
    if refusal.code in (Code.CAPACITY, Code.FRAGMENTED):
        assert starts, f"{refusal}, and yet it finds no place when all others have finished"
    elif refusal.code is Code.NEVER_FITS:
        idle.open[:] = True
        assert isinstance(policy.place(gang, idle, rng()), Refusal)
    elif world.ledger.open.any():
        assert starts, f"{refusal}, and yet it finds no place when all nodes are open and empty"


@installed("cotenant.cpu_allocators")
@given(specs(), st.lists(shapes(), max_size=3))
def test_every_role_gets_cores_unless_it_requests_none(
    plugin: plugins.Plugin, spec: JobSpec, made_of: list[NodeShape]
) -> None:
    allocator: CpuAllocator = plugin.make()
    sizing = allocator.size(spec, UNKNOWN, made_of)
    assert len(sizing.cores) == len(spec.roles)
    assert sizing.reason
    assert plugin.make().size(spec, UNKNOWN, made_of) == sizing
    for role, cores in zip(spec.roles, sizing.cores, strict=True):
        assert cores >= 1 or role.request.cores == 0


@installed("cotenant.cpu_allocators")
@given(specs(roles_max=2), st.lists(shapes(), min_size=1, max_size=3), st.none() | st.integers(1, 64))
def test_a_fitting_job_still_fits_with_its_allocated_cores(
    plugin: plugins.Plugin, spec: JobSpec, made_of: list[NodeShape], useful: int | None
) -> None:
    if never_fits(spec, made_of, elastic=True):
        return
    estimate = Estimate(predictable=useful is not None, confidence=0.9, cores_useful=useful)
    sizing = plugin.make().size(spec, estimate, made_of)
    for role, cores in zip(spec.roles, sizing.cores, strict=True):
        request = dataclasses.replace(role.request, cores=cores)
        assert any(room_on(shape, request) for shape in made_of), f"no node could hold {role} with {cores} cores"


points = st.lists(
    st.builds(Point, st.integers(1, 40), st.floats(0.01, 1e3), windows=st.integers(1, 8)), max_size=6
).map(tuple)


@st.composite
def running(draw: st.DrawFn) -> ResizableJob:
    """Draw a running job with some cores, some of which may be lent."""
    spec = draw(specs(roles_max=2).filter(resizable))
    count, lead = len(spec.roles), leading_role(spec)
    cores = tuple(draw(st.integers(1, 24)) for _ in range(count))
    spare = tuple(draw(st.sampled_from([0, 1, 2, 7, 30])) if number == lead else 0 for number in range(count))
    useful, rest = draw(st.none() | st.integers(1, 64)), draw(st.none() | st.floats(0, 1e7))
    return ResizableJob(
        "job",
        spec,
        Estimate(cores_useful=useful, cores_useful_confidence=0.9 if useful else 0.0, remaining_seconds=rest),
        cores,
        spare,
        draw(points),
        settled_seconds=draw(st.sampled_from([0.0, 90.0, 1e6])),
        node_share=tuple(draw(st.integers(1, 24)) for _ in range(count)),
        lent=tuple(draw(st.integers(0, each - 1)) for each in cores),
        known=draw(points),
    )


@installed("cotenant.cpu_allocators")
@settings(max_examples=examples(60))
@given(running())
def test_a_sizing_is_within_bounds_and_deterministic(plugin: plugins.Plugin, job: ResizableJob) -> None:
    allocator, other = plugin.make(), plugin.make()
    if not isinstance(allocator, Resizes):
        return
    assert allocator.interval_seconds > 0
    assert allocator.measure_seconds > 0
    assert 0 <= allocator.weight(job) < math.inf
    wish = allocator.resize(job, NOW)
    assert other.resize(job, NOW) == wish
    if wish is None:
        return
    assert wish.reason
    for number, (cores, held, spare) in enumerate(zip(wish.cores, job.cores, job.spare, strict=True)):
        assert 1 <= cores <= held + spare
        assert number == job.lead or cores == held, "only the leading role changes"


observations = st.builds(
    Observation,
    user=st.sampled_from(["ann", "bob"]),
    model=st.sampled_from(["", "bert"]),
    name=st.sampled_from(["", "run/7"]),
    gpu_milli=st.sampled_from([0, 1000]),
    replicas=st.just(1),
    allocation=st.builds(Candidate, cores=st.integers(0, 4), gpu_type=st.sampled_from(["", "A100"])),
    rate_per_second=st.none() | st.floats(1e-3, 1e6),
    run_seconds=st.none() | st.floats(1e-3, 1e9),
    succeeded=st.booleans(),
    job_id=st.sampled_from(["", "j1"]),
    step=st.none() | st.integers(0, 100),
    loss=st.none() | st.floats(),
    batch_size=st.none() | st.integers(1, 64),
    batch_seconds=st.none() | st.floats(1e-6, 10.0),
)
queries = st.builds(
    Query,
    user=st.sampled_from(["ann", "bob"]),
    model=st.sampled_from(["", "bert"]),
    name=st.sampled_from(["", "run/7"]),
    gpu_milli=st.sampled_from([0, 1000]),
    replicas=st.just(1),
    cores=st.none() | st.integers(0, 4),
    run_seconds=st.floats(0, 1e9),
    step=st.integers(0, 100),
    steps_total=st.integers(0, 200),
    expected_seconds=st.none() | st.floats(1.0, 1e9),
    job_id=st.sampled_from(["", "j1"]),
    loss_goal=st.builds(
        LossGoal, st.none() | st.floats(-10, 10), st.sampled_from([0, 10]), st.sampled_from([0.0, 0.1])
    ),
    qos=st.builds(
        Qos,
        latency_seconds=st.floats(0, 1),
        latency_percentile=st.sampled_from([0.0, 99.0]),
        arrivals_per_second=st.floats(0, 1e4),
    ),
    candidates=st.lists(st.builds(Candidate, cores=st.integers(0, 4)), max_size=2).map(tuple),
)


@installed("cotenant.predictors")
@given(st.lists(observations, max_size=20), queries)
def test_an_estimate_makes_sense_and_survives_a_restart(
    plugin: plugins.Plugin, seen: list[Observation], query: Query
) -> None:
    predictor: Predictor = plugin.make()
    for observation in seen:
        predictor.observe(observation)
    estimate = predictor.estimate(query)
    assert estimate.source
    assert 0 <= estimate.confidence <= 1
    assert len(estimate.candidates) == len(query.candidates)
    if estimate.predictable:
        assert estimate.remaining_seconds is not None
        low, high = estimate.remaining_p10_seconds, estimate.remaining_p90_seconds
        assert (low or 0) <= estimate.remaining_seconds <= (math.inf if high is None else high)
        assert math.isfinite(estimate.remaining_seconds)
    else:
        assert (estimate.remaining_seconds, estimate.confidence) == (None, 0.0)
    restarted: Predictor = plugin.make()
    assert restarted.restore(predictor.dump()) == []
    assert restarted.estimate(query) == estimate
    assert predictor.dump() == {}, "nothing has changed since the last dump"


@installed("cotenant.predictors")
def test_an_unknown_job_has_no_estimate(plugin: plugins.Plugin) -> None:
    estimate = plugin.make().estimate(Query("ann", "bert", "", gpu_milli=1000, replicas=1))
    assert not estimate.predictable
    assert (estimate.remaining_seconds, estimate.cores_useful, estimate.candidates) == (None, None, ())
    assert estimate.source


@installed("cotenant.predictors")
@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["rate_per_second", "run_seconds"])
def test_an_observation_with_an_invalid_value_is_rejected(plugin: plugins.Plugin, field: str, figure: float) -> None:
    predictor: Predictor = plugin.make()
    sound = Observation("ann", "bert", "", 1000, 1, Candidate(4), rate_per_second=1.0, run_seconds=9.0, succeeded=True)
    with pytest.raises(ValueError, match="positive and finite"):
        predictor.observe(dataclasses.replace(sound, **{field: figure}))  # type: ignore[arg-type]  # by name
    assert predictor.dump() == {}


@installed("cotenant.predictors")
@given(st.dictionaries(st.text(max_size=5), st.binary(min_size=1, max_size=30), max_size=3))
def test_unreadable_records_are_named(plugin: plugins.Plugin, records: dict[str, bytes]) -> None:
    assert set(plugin.make().restore(records)) == set(records)


def test_an_explicit_number_of_cores_is_honoured_by_all() -> None:
    spec = JobSpec(roles=(Role(request=Request(1000, cores=0)), Role(request=Request(1000, cores=7))))
    for plugin in plugins.discover("cotenant.cpu_allocators"):
        assert plugin.make().size(spec, UNKNOWN, [NodeShape(8, 24)]).cores == (0, 7), plugin.name
