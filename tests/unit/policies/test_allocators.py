from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import shapes, specs
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.prediction.core_curve import Point
from cotenant.core.sizing.resize import ResizableJob, Resizes
from cotenant.policies.aiturbo.policy import AITurbo
from cotenant.policies.coda_adaptive import CodaAdaptive
from cotenant.policies.proportional import Proportional
from cotenant.policies.requested import Requested
from cotenant.policies.role_based import RoleBased
from cotenant.policies.xiao import Xiao


def spec(*roles: Role) -> JobSpec:
    return JobSpec(roles=roles)


def worker(gpu_milli: int, replicas: int = 1, cores: int | None = None, gpu_type: str = "") -> Role:
    return Role("worker", replicas, Request(gpu_milli, cores, gpu_type=gpu_type))


def proportional(job: JobSpec, *shapes: NodeShape) -> tuple[int, ...]:
    return Proportional().size(job, UNKNOWN, shapes).cores


def test_requested_gives_the_request_or_one_core() -> None:
    sizing = Requested().size(spec(worker(1000), worker(1000, cores=5)), UNKNOWN, [])
    assert sizing.cores == (1, 5)
    assert sizing.reason == "1 core per replica without a request"
    assert Requested().size(spec(worker(1000, cores=5)), UNKNOWN, []).reason == "as requested"


def test_a_replica_gets_its_gpus_share_of_the_nodes_cores() -> None:
    node = NodeShape(gpus=8, cores=24)
    assert proportional(spec(worker(1000)), node) == (3,)
    assert proportional(spec(worker(8000)), node) == (24,)
    assert proportional(spec(worker(500)), NodeShape(8, 64, shareable=True)) == (4,)
    assert proportional(spec(worker(100)), NodeShape(8, 24, shareable=True)) == (1,)


def test_the_smallest_share_of_all_shapes_that_hold_the_replica_counts() -> None:
    fat, thin, other = (
        NodeShape(1, 16, gpu_type="A100"),
        NodeShape(8, 24, gpu_type="A100"),
        NodeShape(4, 4, gpu_type="T4"),
    )
    assert proportional(spec(worker(1000, gpu_type="a100")), fat, thin, other) == (3,)
    assert proportional(spec(worker(1000, gpu_type="t4")), fat, thin, other) == (1,)
    assert proportional(spec(worker(8000)), fat, thin) == (24,)


def test_without_a_shape_that_could_hold_it_a_replica_gets_one() -> None:
    assert proportional(spec(worker(1000))) == (1,)
    assert proportional(spec(worker(9000)), NodeShape(8, 24)) == (1,)


def test_cpu_jobs_and_explicit_numbers_are_left_alone() -> None:
    assert proportional(spec(Role("cpu"), worker(1000, cores=11), worker(0, cores=0)), NodeShape(8, 24)) == (1, 11, 0)


def test_workers_leave_cores_to_the_other_roles_where_the_cluster_has_no_more() -> None:
    job = spec(worker(1000, replicas=8), Role("ps", 2, Request(cores=4)))
    assert proportional(job, NodeShape(8, 24)) == (2, 4)
    assert proportional(job, NodeShape(8, 24, count=2)) == (3, 4)
    assert "the cluster has no more" in Proportional().size(job, UNKNOWN, [NodeShape(8, 24)]).reason


@given(specs(), st.lists(shapes(), min_size=1, max_size=3))
def test_a_job_that_could_have_its_cores_is_never_given_more_than_the_cluster_has(
    job: JobSpec, made_of: list[NodeShape]
) -> None:
    least = sum(role.replicas * (1 if role.request.cores is None else role.request.cores) for role in job.roles)
    total = sum(shape.cores * shape.count for shape in made_of)
    given_ = sum(role.replicas * each for role, each in zip(job.roles, proportional(job, *made_of), strict=True))
    if least <= total:
        assert given_ <= total


NODE = NodeShape(gpus=8, cores=24)
SETTLED = 1e4


def running(job: JobSpec, held: int, spare: int, rates: dict[int, float], estimate: Estimate = UNKNOWN) -> ResizableJob:
    """A job of one role that was measured often, so that noise decides nothing."""
    points = tuple(Point(cores, rate, windows=64) for cores, rate in rates.items())
    return ResizableJob("job", job, estimate, (held,), (spare,), points, settled_seconds=SETTLED, node_share=(3,))


def wish(allocator: Resizes, job: ResizableJob) -> int | None:
    sizing = allocator.resize(job, now=0.0)
    return sizing.cores[0] if sizing else None


def test_a_role_gets_its_cores_whatever_it_computes_as_far_as_there_are_some() -> None:
    job = spec(worker(2000, replicas=2), Role("ps", 2))
    assert RoleBased().size(job, UNKNOWN, [NodeShape(8, 48)]).cores == (8, 3)
    assert RoleBased().size(job, UNKNOWN, [NodeShape(8, 6, count=9)]).cores == (6, 3)
    assert RoleBased().size(job, UNKNOWN, [NodeShape(8, 14)]).cores == (4, 2), "the cluster has 14 cores"
    assert RoleBased().size(spec(Role("cpu")), UNKNOWN, [NODE]).cores == (1,)
    options = RoleBased.Options(server_cores=1, worker_cores=2)
    assert RoleBased(options).size(job, UNKNOWN, [NODE]).cores == (4, 1)


def test_xiao_gives_theta_once_it_is_known_well_enough_and_the_share_until_then() -> None:
    sure, unsure = (Estimate(cores_useful=6, cores_useful_confidence=sure) for sure in (0.9, 0.4))
    slim = Estimate(cores_useful=2, cores_useful_confidence=0.9)
    job = spec(worker(1000))
    assert [Xiao().size(job, known, [NODE]).cores for known in (sure, slim, unsure, UNKNOWN)] == [
        (3,),
        (2,),
        (3,),
        (3,),
    ]
    assert wish(Xiao(), running(job, 3, 9, {}, sure)) == 6
    assert wish(Xiao(), running(job, 3, 1, {}, sure)) == 4, "no more are spare"
    assert wish(Xiao(), running(job, 3, 9, {}, unsure)) is None
    assert wish(Xiao(Xiao.Options(confidence_min=0.3)), running(job, 3, 9, {}, unsure)) == 6


def test_xiao_measures_by_an_optimal_design_without_a_predictor() -> None:
    job = spec(worker(1000))
    assert wish(Xiao(), running(job, 3, 9, {3: 10.0})) == 12, "the most cores bound the gain of all others"
    assert wish(Xiao(), running(job, 12, 0, {3: 10.0, 12: 10.0})) == 1
    assert wish(Xiao(), running(job, 1, 11, {1: 10.0, 3: 10.0, 12: 10.0})) == 1
    assert wish(Xiao(Xiao.Options(trials=False)), running(job, 3, 9, {3: 10.0})) is None


def test_coda_starts_from_what_is_known_of_the_job_its_category_or_its_gpus() -> None:
    def started(model: str, gpu_milli: int = 1000, estimate: Estimate = UNKNOWN, node: NodeShape = NODE) -> int:
        job = JobSpec(roles=(worker(gpu_milli),), model=model)
        return CodaAdaptive().size(job, estimate, [node]).cores[0]

    roomy = NodeShape(gpus=8, cores=96)
    assert [started(model, node=roomy) for model in ("resnet50", "deepspeech", "bert", "mine")] == [6, 3, 2, 12]
    assert started("resnet50", 4000, node=roomy) == 24
    assert started("resnet50") == 3, "its GPUs' share, so that no GPU is left without cores"
    assert started("resnet50", estimate=Estimate(cores_useful=1, cores_useful_confidence=0.9)) == 1


def test_coda_goes_up_while_that_gains_and_down_while_nothing_is_lost() -> None:
    job = spec(worker(1000))
    assert wish(CodaAdaptive(), running(job, 3, 9, {3: 3.0})) == 4
    assert wish(CodaAdaptive(), running(job, 4, 8, {3: 3.0, 4: 4.0})) == 6
    assert wish(CodaAdaptive(), running(job, 6, 6, {3: 3.0, 4: 4.0, 6: 4.0})) == 4, "6 gained nothing over 4"
    assert wish(CodaAdaptive(), running(job, 4, 8, {3: 3.0, 4: 3.0})) == 1
    assert wish(CodaAdaptive(), running(job, 1, 11, {1: 1.5, 3: 3.0, 4: 3.0})) == 2
    assert wish(CodaAdaptive(), running(job, 3, 0, {3: 3.0})) == 2, "no more are spare"


def test_a_job_that_is_being_measured_is_left_alone() -> None:
    for allocator in (CodaAdaptive(), Xiao(), AITurbo()):
        early = ResizableJob("job", spec(worker(1000)), UNKNOWN, (3,), (9,), (Point(3, 1.0),), settled_seconds=45.0)
        sizing = allocator.resize(early, now=0.0)
        assert sizing is None or sizing.cores == (3,)


def test_aiturbo_trades_cores_for_time_and_leaves_unpredictable_jobs_their_share() -> None:
    job, known = spec(worker(1000)), Estimate(predictable=True, confidence=1.0, remaining_seconds=3600.0)
    assert wish(AITurbo(), running(job, 3, 9, {3: 3.0, 4: 4.0}, known)) == 4
    assert wish(AITurbo(), running(job, 4, 8, {3: 3.9, 4: 4.0, 5: 4.0}, known)) == 3, "a core for a fortieth is dear"
    assert wish(AITurbo(), running(job, 4, 8, {3: 3.0, 4: 4.0, 5: 4.0}, known)) == 4
    assert wish(AITurbo(), running(job, 1, 2, {1: 1.0})) == 3
    cheap = AITurbo(AITurbo.Options(core_weight=0.01))
    assert wish(cheap, running(job, 4, 8, {3: 3.9, 4: 4.0, 5: 4.0}, known)) == 4


def test_aiturbo_weighs_a_gain_by_the_service_that_is_left() -> None:
    job = spec(worker(1000))
    short, long = (Estimate(predictable=True, confidence=1.0, remaining_seconds=rest) for rest in (60.0, 6000.0))
    light, heavy = (AITurbo().weight(running(job, 3, 0, {}, rest)) for rest in (short, long))
    assert heavy == 100 * light
    assert AITurbo().weight(running(job, 3, 0, {})) == light, "of unknown length: as if a minute was left"


def test_coda_starts_with_what_similar_jobs_need_within_the_share_of_the_gpus() -> None:
    def started(useful: int) -> int:
        return CodaAdaptive().size(spec(worker(1000)), Estimate(cores_useful=useful), [NodeShape(8, 96)]).cores[0]

    assert [started(useful) for useful in (0, 1, 5, 12, 40)] == [1, 1, 5, 12, 12]
