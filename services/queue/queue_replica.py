"""What a replica of the queue is made of, whether it leads or follows."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leadership_term import Held
from cotenant.rpc.server import Host
from cotenant.services.queue.api.follower_reads import QueueReader
from cotenant.services.queue.api.server import JobQueue, QueueConfig
from cotenant.store.port import Store

PREFIX = "queue/"
LEADER = "queue/leader"


class Replicated:
    """Makes a queue anew for each term, and what answers between them."""

    def __init__(self, config: QueueConfig, placement: grpc.aio.Channel, predictor: grpc.aio.Channel) -> None:
        self._config, self._placement, self._predictor = config, placement, predictor
        self._reader = QueueReader()

    def check(self, store: Store) -> None:
        """Find out before anybody is elected whether a queue can be made.

        Raises:
            UnknownPolicy: the policy is not installed, or broken.
            BadOption: it does not take an option.
        """
        JobQueue(store, self._config, self._placement, self._predictor)

    def read(self, on_serving: Callable[[], None]) -> QueueReader:
        """Begin to follow."""
        self._reader = QueueReader()
        return self._reader

    async def lead(self, host: Host, store: Store, held: Held) -> JobQueue:
        """Begin to lead, from the records that were read while this replica followed.

        They are given away once: where nothing comes of this, another state may have taken them in already.
        """
        reader, self._reader = self._reader, QueueReader()
        term = held.term if held.lease else 0
        queue = JobQueue(FencedStore(store, held), self._config, self._placement, self._predictor, term)
        queue.add_to(host)
        await queue.start(reader.records)
        queue.run()
        return queue
