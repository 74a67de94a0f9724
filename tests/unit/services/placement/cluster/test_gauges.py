from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.services.mesh import running

from cotenant.services.placement.cluster import gauges as placement_gauges
from cotenant.services.placement.cluster.gauges import Gauges
from cotenant.services.queue.scheduling import wait_metrics as queue_waits
from cotenant.services.queue.scheduling.wait_metrics import WaitMetrics
from cotenant.telemetry import Gauge
from cotenant.v1 import node_service_pb2 as node_pb2


async def test_held_free_and_closed_add_up_to_the_total() -> None:
    async with running() as mesh:
        await mesh.agent("n1", gpus=2)
        await mesh.agent("n2", gpus=4)
        job_id = await mesh.submit()
        job = await mesh.reach(job_id, "RUNNING")
        other = next(one for one in ("n1", "n2") if one != job.attempt.allocations[0].node_id)
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id=other))

        gauges = Gauges(mesh.parts["placement"].service.cluster)
        gpus, cores, nodes = gauges.report()
        assert nodes == {"ready": 1, "cordoned": 1}
        assert gpus["held"] == 1
        assert gpus["closed"] == {"n1": 2, "n2": 4}[other]
        assert (sum(gpus.values()), gpus["ill"]) == (6, 0)
        assert cores["held"] >= 1
        assert cores["closed"] > 0
        phases = WaitMetrics(mesh.parts["queue"].service.state).report_phases()
        assert phases == {("running", "training"): 1}


async def test_a_state_without_nodes_is_reported_as_zero() -> None:
    async with running() as mesh:
        await mesh.agent("n1")
        gauges = Gauges(mesh.parts["placement"].service.cluster)
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1"))
        assert gauges.report()[2] == {"cordoned": 1}
        await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
        assert gauges.report()[2] == {"ready": 1}


async def test_a_former_leader_resets_its_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps exporting its last gauge values, beside those of the next leader."""
    told: dict[tuple[Any, ...], float] = {}

    def kept(gauge: Gauge) -> Callable[..., None]:
        def report(value: float, **attributes: str) -> None:
            told[gauge._name, *attributes.items()] = value

        return report

    for module, pause, names in (
        (placement_gauges, "REPORT_SECONDS", ("GPUS", "CORES", "NODES")),
        (queue_waits, "TELL_SECONDS", ("JOBS", "WAITING")),
    ):
        for name in names:
            stand_in = type("Told", (), {"set": staticmethod(kept(getattr(module, name)))})
            monkeypatch.setattr(module, name, stand_in)
        monkeypatch.setattr(module, pause, 0.01)
    async with running() as mesh:
        await mesh.agent("n1", gpus=2)
        await mesh.reach(await mesh.submit(), "RUNNING")
        await mesh.submit(gpus=2)
        async with asyncio.timeout(60):
            while len({name for (name, *_), value in told.items() if value}) < 5:  # noqa: ASYNC110  # tells nobody
                await asyncio.sleep(0.01)
    assert set(told.values()) == {0}
