"""Profiles of job classes as the service lists them."""

from __future__ import annotations

import grpc
import pytest
from tests.unit.services.predictor.conftest import Restarts, run, serving, spec, window

from cotenant.services.predictor.models.job_classes import JobClasses
from cotenant.store.memory import MemoryStore
from cotenant.v1 import predictor_service_pb2 as pb


async def test_job_classes_are_listed_in_pages_and_filtered() -> None:
    async with serving(MemoryStore()) as served:
        await served.until(serving=True)
        models = [f"m{number}" for number in range(5)]
        await served.observe(*(window(f"j{model}", spec=spec(model)) for model in models))
        seen, token = [], ""
        while True:
            page: pb.ListProfilesResponse = await served.stub.ListProfiles(
                pb.ListProfilesRequest(page_size=2, page_token=token)
            )
            assert page.total_size == 5
            seen += [profile.model for profile in page.profiles]
            token = page.next_page_token
            if not token:
                break
        assert seen == models
        one = await served.stub.ListProfiles(pb.ListProfilesRequest(model="m3"))
        assert [profile.model for profile in one.profiles] == ["m3"]
        assert one.profiles[0].seen_time.seconds == 1000
        assert not (await served.stub.ListProfiles(pb.ListProfilesRequest(user="nobody"))).profiles
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.ListProfiles(pb.ListProfilesRequest(page_token="x"))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_profiles_survive_a_restart(restarts: Restarts) -> None:
    async with serving(await restarts.store()) as served:
        await served.until(serving=True)
        await served.observe(window(cores=4, rate=3.0), run("j2", seconds=60))
    async with serving(await restarts.store()) as served:
        await served.until(serving=True)
        [profile] = (await served.stub.ListProfiles(pb.ListProfilesRequest())).profiles
        assert [(rate.cores, rate.rate_per_second) for rate in profile.settings[0].rates] == [(4, 3.0)]
        assert profile.seen_time.seconds == 2000
        assert [estimate.source.split(":")[0] for estimate in profile.estimates] == ["history"]


def test_a_frequently_observed_class_is_rarely_saved() -> None:
    kinds = JobClasses(kinds_max=2)
    written = 0
    for second in range(600):
        kinds.record(("ann", "bert", "", 1000, 1), 1000.0 + second)
        written += len(kinds.dump())
    assert written == 10
    for model in ("a", "b"):
        kinds.record(("ann", model, "", 1000, 1), 5000.0)
    assert kinds.find() == ["ann/a/1000/1", "ann/b/1000/1"]
    assert kinds.dump()["ann/bert/1000/1"] == b""
    assert kinds.restore(
        {"x": b"{}", "y": b'{"key": ["a", "b", "-1", "1"], "model": "", "name": "", "seconds": 1}'}
    ) == [
        "x",
        "y",
    ]
