"""Rate predictors through the API: estimates, persistence and corrupt records."""

from __future__ import annotations

import pytest
from tests.unit.services.predictor.conftest import query, serving, window

from cotenant.services.predictor.api.server import Config
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put

CURVE = {1: 10.0, 2: 20.0, 5: 49.0, 16: 50.0}
XIAO = Config(predictors=("xiao-piecewise",), save_seconds=0.02)


async def test_useful_cores_have_a_confidence_and_are_remembered() -> None:
    store = MemoryStore()
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(
            *[window(at=1000 + at, cores=cores, rate=rate) for at, (cores, rate) in enumerate(CURVE.items())]
        )
        (before,) = await predictor.estimate(query(cores=(3, 12)))
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        (after,) = await predictor.estimate(query(cores=(3, 12)))
    assert after == before
    assert after.cores_useful == 5
    assert after.cores_useful_confidence > 0.9
    assert [round(judged.rate_per_second) for judged in after.candidates] == [30, 50]
    assert after.source == "xiao-piecewise: θ is 4 to 5 cores, from 4 core counts"


@pytest.mark.parametrize("name", ["xiao-piecewise", "scaling", "parameter-server"])
async def test_a_corrupt_record_is_set_aside_and_estimates_continue(name: str) -> None:
    store = MemoryStore()
    await store.transact((), (Put(f"predictor/{name}/ann/x", b'{"key": ["ann"'),))
    async with serving(store, Config(predictors=(name,))) as predictor:
        await predictor.until(serving=True)
        (answer,) = await predictor.estimate(query())
        assert not answer.predictable
        await predictor.observe(window())
    assert not (await store.list(f"predictor/{name}/ann/x")).entries
    (aside,) = (await store.list("unreadable/")).entries
    assert aside.key == f"unreadable/predictor/{name}/ann/x"
