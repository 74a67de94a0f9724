from __future__ import annotations

import pytest

from cotenant.agent.v1 import sample_service_pb2 as pb
from cotenant.services.contention.api.directive_queue import DirectiveQueue


def share(job_id: str, share: float) -> pb.Directive:
    return pb.Directive(job_id=job_id, number=1, share=share)


async def read(directive_queue: DirectiveQueue) -> list[tuple[str, float]]:
    return [(one.job_id, one.share) async for directives in directive_queue.read() for one in directives]


async def test_the_newest_directive_of_each_attempt_waits_in_order() -> None:
    directive_queue = DirectiveQueue()
    directive_queue.put([share("a", 0.5), share("b", 0.5)])
    directive_queue.put([share("a", 0.25)])
    directive_queue.close()
    assert await read(directive_queue) == [("b", 0.5), ("a", 0.25)]


async def test_an_error_ends_the_stream_at_once() -> None:
    directive_queue = DirectiveQueue()
    directive_queue.put([share("a", 0.5)])
    directive_queue.close(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await read(directive_queue)


async def test_the_first_close_counts() -> None:
    directive_queue = DirectiveQueue()
    directive_queue.close(ConnectionError("gone"))
    directive_queue.close()
    with pytest.raises(ConnectionError, match="gone"):
        await read(directive_queue)
