from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from structlog.testing import capture_logs
from tests.unit.services.contention.conftest import NOW, Policy, attempt, sample, sending, serving

from cotenant.agent.v1 import sample_service_pb2
from cotenant.codec.errors import Problem, from_error
from cotenant.core.policy.protocols import AttemptWindow, Directive, NodeWindow
from cotenant.plugins import UnknownPolicy
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.contention.api.server import STREAM_DEAD_SECONDS, Config, start
from cotenant.v1 import contention_service_pb2 as pb
from cotenant.v1 import policy_service_pb2, policy_service_pb2_grpc


def throttle(window: NodeWindow) -> list[Directive]:
    return [Directive(one.job_id, one.number, 0.5, "it hurts its neighbour") for one in window.attempts]


async def refused(call: Any) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return from_error(error.value)


async def test_the_policy_gets_decoded_windows(policy: Policy) -> None:
    async with serving() as contention:
        await contention.stream(sending("n1", sample(memory_bandwidth_bytes_per_second=1e9)))
    expected = AttemptWindow("j1", 1, cpu_job=False, cores_used=3.5, gpu_utilisation_percent=90)
    assert policy.windows == [
        NodeWindow("n1", NOW, 5.0, (expected,), cpu_some_percent=12.5, memory_bandwidth_bytes_per_second=1e9)
    ]


async def test_directives_come_back_on_the_stream(policy: Policy) -> None:
    policy.answer = throttle
    async with serving() as contention:
        (directive,) = await contention.stream(sending("n1", sample()))
    assert (directive.job_id, directive.number, directive.share) == ("j1", 1, 0.5)
    assert directive.reason == "it hurts its neighbour"
    assert directive.id


async def test_without_a_policy_nothing_is_throttled() -> None:
    async with serving() as contention:
        assert await contention.stream(sending("n1", sample(cpu=pb.Pressure(some_avg10=100)))) == []
        assert len(await contention.last()) == 1


async def test_the_last_sample_of_each_node_is_listed() -> None:
    async with serving() as contention:
        await contention.stream(sending("n2", sample("n2", cpu_percent=20)))
        await contention.stream(sending("n1", sample("n1", NOW - 5, cpu_percent=10), sample("", NOW, cpu_percent=15)))
        assert [(one.node_id, one.cpu_percent) for one in await contention.last()] == [("n1", 15), ("n2", 20)]
        assert [one.node_id for one in await contention.last("n2")] == ["n2"]
        assert list(await contention.last("n3")) == []


async def test_a_silent_node_is_dropped() -> None:
    clock = [NOW]
    async with serving(now=lambda: clock[0]) as contention:
        await contention.stream(sending("n1", sample("n1")))
        clock[0] += 901
        assert list(await contention.last()) == []


BAD = {
    "its time is 121 s in the past": sample(at=NOW - 121),
    "its time is 31 s in the future": sample(at=NOW + 31),
    "it has no time": sample(time=None),
    "its window is 0 s": sample(window=None),
    "its window is -1 s": sample(window=Duration(seconds=-1)),
    "cpu_percent is nan": sample(cpu_percent=math.nan),
    "cpu.some_avg10 is 200": sample(cpu=pb.Pressure(some_avg10=200)),
    "memory.full_avg10 is inf": sample(memory=pb.Pressure(full_avg10=math.inf)),
    "memory_used_bytes is -5": sample(memory_used_bytes=-5),
    "memory_bandwidth_bytes_per_second is -2": sample(memory_bandwidth_bytes_per_second=-2),
    "cores_used of job 'j1' is nan": sample(attempts=[attempt(cores_used=math.nan)]),
    "memory_bandwidth_bytes_per_second of job 'j1' is inf": sample(
        attempts=[attempt(memory_bandwidth_bytes_per_second=math.inf)]
    ),
    "rate_per_second of job 'j1' is -1": sample(attempts=[attempt(rate_per_second=-1)]),
    "gpu_utilisation_percent of job 'j1' is 300": sample(attempts=[attempt(gpu_utilisation_percent=300)]),
    "'' with number 1 is not an attempt": sample(attempts=[attempt("")]),
    "it has 4097 attempts": sample(attempts=[attempt()] * 4097),
}


@pytest.mark.parametrize("why", BAD)
async def test_an_invalid_sample_is_logged_once_and_the_stream_continues(why: str, policy: Policy) -> None:
    async with serving() as contention:
        with capture_logs() as logs:
            await contention.stream(sending("n1", BAD[why], BAD[why]), sending("", sample()))
    assert len(policy.windows) == 1
    assert [(line["event"], line["node"]) for line in logs] == [("sample_dropped", "n1"), ("samples_dropped", "n1")]
    assert why in logs[0]["why"]
    assert logs[1]["count"] == 2


async def test_a_duplicate_sample_is_dropped_even_on_a_new_stream(policy: Policy) -> None:
    async with serving() as contention:
        with capture_logs() as logs:
            await contention.stream(sending("n1", sample(), sample()))
            await contention.stream(sending("n1", sample(at=NOW - 3), sample(at=NOW + 5)))
    assert [window.now for window in policy.windows] == [NOW, NOW + 5]
    assert [line["why"] for line in logs if "why" in line] == [
        "it ended 0 s before the last sample, or at the same time",
        "it ended 3 s before the last sample, or at the same time",
    ]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([sending("", sample())], "node_id: is missing in the first message"),
        ([sending("../n1", sample())], "node_id: must be printable and without slashes"),
        ([sending("n1"), sending("n2")], "node_id: is 'n2' on a stream of node 'n1'"),
        ([sending("n1", sample("n1"), sample("n2"))], "samples[1].node_id: is 'n2' on a stream of node 'n1'"),
        ([sending("n1", *[sample()] * 1001)], "samples: has 1001 samples; at most 1000 fit"),
    ],
)
async def test_a_stream_with_inconsistent_node_ids_is_refused(
    requests: list[sample_service_pb2.StreamSamplesRequest], message: str
) -> None:
    async with serving() as contention:
        problem = await refused(contention.stream(*requests))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.message.startswith(message)


async def test_the_number_of_buffered_nodes_is_bounded() -> None:
    async with serving(Config(nodes_max=1)) as contention:
        await contention.stream(sending("n1", sample("n1")))
        problem = await refused(contention.stream(sending("n2", sample("n2"))))
        assert (problem.code, problem.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_NODES")


async def test_fifty_nodes_stream_at_once_and_each_gets_its_own_directives(policy: Policy) -> None:
    policy.answer = throttle
    nodes = [f"n{index}" for index in range(50)]
    async with serving() as contention:
        samples = {
            node: [sample(node, NOW + tick, attempts=[attempt(f"job-on-{node}")]) for tick in range(10)]
            for node in nodes
        }
        answers = await asyncio.gather(
            *(contention.stream(*(sending(node, one) for one in samples[node])) for node in nodes)
        )
        assert len(await contention.last()) == 50
    assert len(policy.windows) == 500
    for node, directives in zip(nodes, answers, strict=True):
        assert {directive.job_id for directive in directives} == {f"job-on-{node}"}


async def test_a_slow_reader_delays_no_other_and_gets_the_newest_directive(policy: Policy) -> None:
    """The slow agent never reads, while more is sent to it than all buffers hold."""
    long_reason = "x" * 100_000
    policy.answer = lambda window: [Directive("j1", 1, window.now % 1, long_reason)]
    ticks = 400
    all_sent = asyncio.Event()

    async def send_all() -> AsyncIterator[sample_service_pb2.StreamSamplesRequest]:
        for tick in range(ticks):
            yield sending("slow", sample("slow", NOW + tick / 1024))
        all_sent.set()

    async with serving() as contention:
        slow = contention.sample_stub().StreamSamples(send_all())
        await all_sent.wait()
        policy_of_others = await contention.stream(sending("quick", sample("quick", NOW + 0.5)))
        assert [directive.share for directive in policy_of_others] == [0.5]
        received = [directive.share async for response in slow for directive in response.directives]
    assert len([window for window in policy.windows if window.node_id == "slow"]) == ticks
    assert received == sorted(received)
    assert received[-1] == pytest.approx((ticks - 1) / 1024, abs=1e-6)
    assert len(received) < ticks, "old directives were replaced by newer ones"


async def test_a_failing_policy_is_logged_once_and_the_stream_continues(policy: Policy) -> None:
    def judge(window: NodeWindow) -> list[Directive]:
        if window.now < NOW + 3:
            raise ZeroDivisionError("of course")
        return throttle(window)

    policy.answer = judge
    async with serving() as contention:
        with capture_logs() as logs:
            directives = await contention.stream(*(sending("n1", sample(at=NOW + tick)) for tick in range(5)))
    assert [directive.share for directive in directives][-1] == 0.5
    assert [(line["event"], line["policy"], line["node"]) for line in logs] == [
        ("contention_policy_failed", "none", "n1"),
        ("contention_policy_recovered", "none", "n1"),
    ]
    assert logs[0]["error"] == "ZeroDivisionError: of course"
    assert logs[1]["failures"] == 3


async def test_a_failing_policy_is_logged_again_on_the_next_stream(policy: Policy) -> None:
    policy.answer = lambda window: [1 / 0]  # type: ignore[list-item]  # it raises before that matters
    async with serving() as contention:
        with capture_logs() as logs:
            for tick in range(2):
                await contention.stream(sending("n1", sample(at=NOW + tick)))
    assert [line["event"] for line in logs] == ["contention_policy_failed"] * 2


@pytest.mark.parametrize(
    ("nonsense", "error"),
    [
        (Directive("j1", 1, math.nan, ""), "a directive has the share nan; it must be from 0 to 1"),
        (Directive("j1", 1, 2.0, ""), "a directive has the share 2.0; it must be from 0 to 1"),
        (Directive("j9", 1, 0.5, ""), "a directive is for job j9, attempt 1, which is not on the node"),
        (None, "AttributeError: 'NoneType' object has no attribute 'share'"),
    ],
)
async def test_an_invalid_directive_is_logged_and_not_sent(policy: Policy, nonsense: Any, error: str) -> None:
    policy.answer = lambda window: [nonsense]
    async with serving() as contention:
        with capture_logs() as logs:
            assert await contention.stream(sending("n1", sample())) == []
    assert [(line["event"], line["error"]) for line in logs] == [("contention_policy_failed", error)]


async def test_an_invalid_directive_does_not_block_the_others(policy: Policy) -> None:
    policy.answer = lambda window: [Directive("j9", 1, 0.5, ""), *throttle(window)]
    async with serving() as contention:
        assert [one.job_id for one in await contention.stream(sending("n1", sample()))] == ["j1"]


async def test_a_new_stream_of_a_node_ends_its_old_one() -> None:
    async with serving() as contention:
        old = contention.sample_stub().StreamSamples()
        await old.write(sending("n1", sample()))
        await until_known(contention, "n1")
        await contention.stream(sending("n1", sample(at=NOW + 1)))
        problem = await refused(old.read())
        assert (problem.code, problem.reason) == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")


async def test_the_end_of_an_old_stream_does_not_affect_the_new_one() -> None:
    async with serving() as contention:
        old, new = contention.sample_stub().StreamSamples(), contention.sample_stub().StreamSamples()
        await old.write(sending("n1", sample()))
        await until_known(contention, "n1")
        await new.write(sending("n1", sample(at=NOW + 1)))
        await refused(old.read())
        await contention.servicer.close()
        assert (await refused(new.read())).reason == "UNAVAILABLE"


async def test_closing_contention_ends_its_streams_so_that_agents_look_for_another() -> None:
    async with serving() as contention:
        stream = contention.sample_stub().StreamSamples()
        await stream.write(sending("n1", sample()))
        await until_known(contention, "n1")
        await contention.servicer.close()
        assert (await refused(stream.read())).code is grpc.StatusCode.UNAVAILABLE


async def test_only_samples_remain_of_an_agent_that_vanishes(policy: Policy) -> None:
    async with serving() as contention:
        with capture_logs() as logs:
            stream = contention.sample_stub().StreamSamples()
            await stream.write(sending("n1", sample()))
            await until_known(contention, "n1")
            stream.cancel()
            await contention.stream(sending("n1", sample(at=NOW + 1)))
            assert len(await contention.last()) == 1
    assert [line["event"] for line in logs if line["event"] == "call_failed"] == []


async def until_known(contention: Any, node_id: str) -> None:
    while not await contention.last(node_id):
        pass


async def test_incidents_are_listed_newest_first_in_pages(policy: Policy) -> None:
    policy.answer = throttle
    async with serving() as contention:
        for index in range(3):
            node = f"n{index}"
            await contention.stream(sending(node, sample(node, attempts=[attempt(f"j{index}")])))
        first = await contention.incidents(page_size=2)
        assert [one.suspect_job_id for one in first.incidents] == ["j2", "j1"]
        second = await contention.incidents(page_size=2, page_token=first.next_page_token)
        assert [one.suspect_job_id for one in second.incidents] == ["j0"]
        assert not second.next_page_token
        assert [one.node_id for one in (await contention.incidents(node_id="n1")).incidents] == ["n1"]
        problem = await refused(contention.incidents(page_token="?"))
        assert problem.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_samples_are_listed_in_pages_by_node() -> None:
    async with serving() as contention:
        for node in ("n2", "n1", "n3"):
            await contention.stream(sending(node, sample(node)))
        first = await contention.stub().ListSamples(pb.ListSamplesRequest(page_size=2))
        assert [one.node_id for one in first.samples] == ["n1", "n2"]
        token = first.next_page_token
        second = await contention.stub().ListSamples(pb.ListSamplesRequest(page_size=2, page_token=token))
        assert [one.node_id for one in second.samples] == ["n3"]
        assert not second.next_page_token
        for bad in ({"page_size": -1}, {"page_token": "?"}, {"page_token": token, "node_id": "n3"}):
            problem = await refused(contention.stub().ListSamples(pb.ListSamplesRequest(**bad)))
            assert problem.violations[0].field in bad


async def test_a_page_of_incidents_is_not_continued_after_a_restart_or_in_another_list(policy: Policy) -> None:
    policy.answer = throttle
    async with serving() as before, serving() as after:
        for contention in (before, after):
            for index in range(2):
                await contention.stream(sending("n1", sample("n1", at=NOW + index, attempts=[attempt(f"j{index}")])))
        token = (await before.incidents(page_size=1)).next_page_token
        assert (await before.incidents(page_token=token)).incidents
        for contention, wanted in ((after, {}), (before, {"node_id": "n1"})):
            problem = await refused(contention.incidents(page_token=token, **wanted))
            assert [one.field for one in problem.violations] == ["page_token"]
        problem = await refused(before.incidents(page_size=-1))
        assert [one.field for one in problem.violations] == ["page_size"]


async def test_a_policy_that_is_not_installed_is_named_at_the_start() -> None:
    server = Server()
    with pytest.raises(UnknownPolicy, match="did you mean none"):
        await start(server, serve_policies(server), Config(policy="nome"))


async def test_the_policy_service_lists_the_active_policy() -> None:
    async with serving() as contention:
        stub = policy_service_pb2_grpc.PolicyServiceStub(contention.channel)
        listed = await stub.ListPolicies(policy_service_pb2.ListPoliciesRequest())
        assert [(one.group, one.name) for one in listed.policies if one.active] == [
            ("cotenant.contention_policies", "none")
        ]


def of_agent(incarnation: str, at: float = NOW) -> sample_service_pb2.StreamSamplesRequest:
    request = sending("n1", sample(at=at))
    request.incarnation = incarnation
    return request


async def test_a_second_agent_with_a_nodes_id_does_not_evict_the_first() -> None:
    clock = [NOW]
    async with serving(now=lambda: clock[0]) as contention:
        first = contention.sample_stub().StreamSamples()
        await first.write(of_agent("one"))
        await until_known(contention, "n1")
        second = contention.sample_stub().StreamSamples()
        await second.write(of_agent("two"))
        problem = await refused(second.read())
        assert (problem.code, problem.reason) == (grpc.StatusCode.ALREADY_EXISTS, "NODE_EXISTS")
        await first.write(of_agent("one", NOW + 1))
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        assert await first.code() is grpc.StatusCode.OK


async def test_a_new_agent_replaces_a_silent_one() -> None:
    clock = [NOW]
    async with serving(now=lambda: clock[0]) as contention:
        first = contention.sample_stub().StreamSamples()
        await first.write(of_agent("one"))
        await until_known(contention, "n1")
        clock[0] += STREAM_DEAD_SECONDS
        await contention.stream(of_agent("two", clock[0]))
        assert (await refused(first.read())).reason == "STREAM_REPLACED"
