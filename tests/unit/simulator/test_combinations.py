"""Laws that hold for any combination of policies, over random worlds; `hunting` tries thousands of them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.simulator import laws
from tests.unit.simulator.auditing import Auditor
from tests.unit.simulator.combinations import FOUND, Case, cases

from cotenant.core.model.job import Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.tenancy import Tenant
from cotenant.simulator import Cluster, TraceJob
from cotenant.simulator.recording.events import Kind

every_queue = pytest.mark.parametrize("queue", [plugin.name for plugin in FOUND["queue"]])
QUICKLY = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking a whole simulation takes minutes: `hunting` does it


@every_queue
@settings(max_examples=examples(8), phases=QUICKLY)
@given(data=st.data())
def test_no_overcommitment_whole_gangs_limits_and_no_forgotten_job(queue: str, data: st.DataObject) -> None:
    laws.audited(data.draw(cases({"queue": queue})))


@every_queue
@settings(max_examples=examples(6), phases=QUICKLY)
@given(data=st.data())
def test_a_waiting_job_starts_once_it_is_alone(queue: str, data: st.DataObject) -> None:
    laws.explained(data.draw(cases({"queue": queue})))


@every_queue
@settings(max_examples=examples(3), phases=QUICKLY)
@given(data=st.data())
def test_the_same_input_and_seed_give_the_same_recording_byte_for_byte(queue: str, data: st.DataObject) -> None:
    laws.replayed(data.draw(cases({"queue": queue})))


# Regressions ---------------------------------------------------------------------------------------------------------

PLAIN, BIG = NodeShape(gpus=1, cores=12), NodeShape(gpus=8, cores=12)
ONE_A100 = NodeShape(gpus=1, cores=16, gpu_type="NVIDIA A100", shareable=True)
EIGHT_A100 = NodeShape(gpus=8, cores=16, gpu_type="NVIDIA A100", shareable=True)
COMPETING = {
    "the servers may take the only A100": ((ONE_A100, BIG), Request(gpu_milli=300, cores=1, gpu_type="a100"), 3),
    "the workers need all of the largest node": (
        (EIGHT_A100, PLAIN, PLAIN),
        Request(gpu_milli=500, cores=1, gpu_type="a100"),
        16,
    ),
}


def behind_all(shapes: tuple[NodeShape, ...], request: Request, workers: int, placement: str, seed: int) -> Case:
    """Return a case in which a gang of workers and servers waits for jobs that hold every GPU."""
    everything = [Role("worker", 1, Request(gpu_milli=1000 * shape.gpus, cores=1)) for shape in shapes]
    hogs = [TraceJob(f"hog-{number}", 0.0, 9000.0, (role,)) for number, role in enumerate(everything)]
    gang = (Role("worker", workers, request), Role("ps", 2, Request(gpu_milli=1000, cores=1)))
    names = {
        "queue": "fifo",
        "placement": placement,
        "allocator": "requested",
        "predictor": "none",
        "contention": "none",
    }
    cluster = Cluster("found", shapes, ("r0",) * len(shapes))
    return Case(cluster, (*hogs, TraceJob("gang", 60.0, 300.0, gang)), (), names, {}, seed)


@pytest.mark.parametrize("placement", [plugin.name for plugin in FOUND["placement"]])
@pytest.mark.parametrize("competing", COMPETING)
def test_a_gang_whose_roles_compete_for_a_node_starts_once_it_is_alone(competing: str, placement: str) -> None:
    for seed in range(5):
        case = behind_all(*COMPETING[competing], placement, seed)
        auditor = Auditor(case)
        case.run(auditor.look, auditor)
        assert not auditor.unschedulable
        assert "gang" in auditor.history.finished


def test_a_job_is_stopped_for_the_one_that_its_limit_kept_out_not_for_the_one_on_its_node() -> None:
    """Both start on what it leaves: one under its tenant's limit, the other on its node, without a right to it."""
    cluster = Cluster("found", (NodeShape(gpus=0, cores=8), NodeShape(gpus=1, cores=5)), ("r0", "r0"))
    jobs = (
        TraceJob("borrower", 0.0, 900.0, (Role("worker", 1, Request(cores=8)),), tenant="d"),
        TraceJob("entitled", 100.0, 60.0, (Role("worker", 1, Request(gpu_milli=1000, cores=5)),), tenant="d"),
        TraceJob("also there", 100.0, 60.0, (Role("worker", 1, Request(cores=5)),), tenant="d"),
    )
    tenants = (Tenant("d", quota_gpu_milli=1000, limit_cores=10),)
    names = {
        "queue": "fifo",
        "placement": "consolidate",
        "allocator": "requested",
        "predictor": "none",
        "contention": "none",
    }
    options = {"simulator": {"fair_share": "tenants", "reclaim": "true", "run_seconds_min": "30"}}
    auditor = Auditor(Case(cluster, jobs, tenants, names, options, 1))
    auditor.case.run(auditor.look, auditor)
    told = auditor.events
    stopped = [(event.job_id, event.by) for event in told if event.kind is Kind.PREEMPTED]
    starts = {event.job_id: event.at_seconds for event in told if event.kind is Kind.STARTED and event.run == 1}
    assert starts == {"borrower": 0.0, "entitled": 100.0, "also there": 100.0}
    assert stopped == [("borrower", ("entitled",))]
