from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.services.mesh import running

from cotenant.services.placement.cluster import gauges as placement_gauges
from cotenant.services.placement.cluster.gauges import Gauges
from cotenant.services.queue.scheduling import wait_metrics as queue_waits
from cotenant.services.queue.scheduling.wait_metrics import Waits
from cotenant.telemetry import Gauge
from cotenant.v1 import node_service_pb2 as node_pb2


async def test_what_is_held_free_and_closed_adds_up_to_all_that_is_there() -> None:
    async with running() as mesh:
        await mesh.agent("n1", gpus=2)
        await mesh.agent("n2", gpus=4)
        job_id = await mesh.submit()
        job = await mesh.reach(job_id, "RUNNING")
        other = next(one for one in ("n1", "n2") if one != job.attempt.allocations[0].node_id)
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id=other))

        gauges = Gauges(mesh.parts["placement"].service.cluster)
        gpus, cores, nodes = gauges.tell()
        assert nodes == {"ready": 1, "cordoned": 1}
        assert gpus["held"] == 1
        assert gpus["closed"] == {"n1": 2, "n2": 4}[other]
        assert (sum(gpus.values()), gpus["ill"]) == (6, 0)
        assert cores["held"] >= 1
        assert cores["closed"] > 0
        phases = Waits(mesh.parts["queue"].service.state).tell_phases()
        assert phases == {("running", "training"): 1}


async def test_a_state_that_no_node_has_any_more_is_told_as_none() -> None:
    async with running() as mesh:
        await mesh.agent("n1")
        gauges = Gauges(mesh.parts["placement"].service.cluster)
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1"))
        assert gauges.tell()[2] == {"cordoned": 1}
        await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(id="n1"))
        assert gauges.tell()[2] == {"ready": 1}


async def test_one_that_leads_no_more_leaves_nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process told last is exported for as long as it lives, beside what the next leader tells."""
    told: dict[tuple[Any, ...], float] = {}

    def kept(gauge: Gauge) -> Callable[..., None]:
        def tell(value: float, **attributes: str) -> None:
            told[gauge._name, *attributes.items()] = value

        return tell

    for module, names in ((placement_gauges, ("GPUS", "CORES", "NODES")), (queue_waits, ("JOBS", "WAITING"))):
        for name in names:
            stand_in = type("Told", (), {"set": staticmethod(kept(getattr(module, name)))})
            monkeypatch.setattr(module, name, stand_in)
        monkeypatch.setattr(module, "TELL_SECONDS", 0.01)
    async with running() as mesh:
        await mesh.agent("n1", gpus=2)
        await mesh.reach(await mesh.submit(), "RUNNING")
        await mesh.submit(gpus=2)
        async with asyncio.timeout(20):
            while len({name for (name, *_), value in told.items() if value}) < 5:  # noqa: ASYNC110  # tells nobody
                await asyncio.sleep(0.01)
    assert set(told.values()) == {0}
