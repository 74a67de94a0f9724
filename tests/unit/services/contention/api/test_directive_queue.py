from __future__ import annotations

import pytest

from cotenant.services.contention.api.directive_queue import Mailbox
from cotenant.v1 import contention_service_pb2 as pb


def share(job_id: str, share: float) -> pb.Directive:
    return pb.Directive(job_id=job_id, number=1, share=share)


async def read(mailbox: Mailbox) -> list[tuple[str, float]]:
    return [(one.job_id, one.share) async for directives in mailbox.read() for one in directives]


async def test_what_waits_is_the_newest_for_each_attempt_in_the_order_in_which_it_came() -> None:
    mailbox = Mailbox()
    mailbox.put([share("a", 0.5), share("b", 0.5)])
    mailbox.put([share("a", 0.25)])
    mailbox.close()
    assert await read(mailbox) == [("b", 0.5), ("a", 0.25)]


async def test_an_error_ends_the_stream_at_once() -> None:
    mailbox = Mailbox()
    mailbox.put([share("a", 0.5)])
    mailbox.close(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await read(mailbox)


async def test_the_first_close_counts() -> None:
    mailbox = Mailbox()
    mailbox.close(ConnectionError("gone"))
    mailbox.close()
    with pytest.raises(ConnectionError, match="gone"):
        await read(mailbox)
