"""A replica of the queue service, which leads or follows."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leader_handlers import LeaderHandlers
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.rpc.server import Host
from cotenant.services.queue.api.follower_reads import QueueReader
from cotenant.services.queue.api.server import JobQueue, QueueConfig
from cotenant.store.port import Store

PREFIX = "queue/"
LEADER = "queue/leader"


class QueueReplica:
    """A replica of the queue: a new `JobQueue` for each term as leader, a `QueueReader` in between."""

    def __init__(self, config: QueueConfig, placement: grpc.aio.Channel, predictor: grpc.aio.Channel) -> None:
        self._config, self._placement, self._predictor = config, placement, predictor
        self._reader = QueueReader()

    def check(self, store: Store) -> None:
        """Check the configuration before the first election.

        Raises:
            UnknownPolicy: the policy is not installed, or broken.
            BadOption: the policy does not take an option.
        """
        JobQueue(LeaderHandlers(), store, self._config, self._placement, self._predictor)

    def read(self, on_serving: Callable[[], None]) -> QueueReader:
        """Start to follow."""
        self._reader = QueueReader()
        return self._reader

    async def lead(self, host: Host, store: Store, held: HeldTerm) -> JobQueue:
        """Start to lead, with the records that were read while following.

        The records are handed over once: if this start fails, another `State` may already own them.
        """
        reader, self._reader = self._reader, QueueReader()
        term = held.term if held.lease else 0
        queue = JobQueue(host, FencedStore(store, held), self._config, self._placement, self._predictor, term)
        await queue.start(reader.records)
        queue.run()
        return queue
