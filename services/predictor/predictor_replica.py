"""What a replica of the predictor is made of, whether it leads or follows.

All replicas know the same: the leader takes observations and writes what it learns; the others read that and answer all
else themselves, also while nobody leads. A leader that takes over first reads all that was kept; until it has, it goes
on answering from what it knew as a follower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leader_handlers import Stage
from cotenant.leadership.leadership_term import Held
from cotenant.leadership.routing_table import ROUTES, Route
from cotenant.leadership.store_cache import Mirror
from cotenant.rpc.server import Host
from cotenant.services.predictor.api.server import SERVICE, Config, Predicting, chain_of, make
from cotenant.services.predictor.models.failure_log import Failures
from cotenant.store.port import NotLeader, Store

LEADER = "predictor/leader"


class PredictorReader:
    """A predictor that follows."""

    def __init__(self, store: Store, config: Config, on_serving: Callable[[], None]) -> None:
        self._stage = Stage(on_serving)
        self._predicting = make(self._stage, store, config, "the leader")

    @property
    def serves(self) -> bool:
        """Whether what was kept has been read."""
        return self._stage.serving[SERVICE]

    def take(self, mirror: Mirror, keys: Iterable[str]) -> None:
        """Pass over what the mirror has; the predictor watches its records itself."""

    async def run(self) -> None:
        """Keep up, until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._predicting.close()

    async def answer(self, path: str, request: bytes, context: Any) -> bytes | None:
        """Answer what every replica knows."""
        return await self._stage.answer(path, request, context) if ROUTES[path] is Route.ANY else None


class Replicated:
    """Makes a predictor that observes for each term, and one that follows between them."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store, self._config = store, config

    def check(self) -> None:
        """Find out before anybody is elected whether a predictor can be made.

        Raises:
            UnknownPolicy, BadOption, ValueError: it cannot.
        """
        chain_of(self._config, Failures())

    def read(self, on_serving: Callable[[], None]) -> PredictorReader:
        """Begin to follow."""
        return PredictorReader(self._store, self._config, on_serving)

    async def lead(self, host: Host, store: Store, held: Held) -> Predicting:
        """Begin to lead; where another process led before, only once all is read that it has written."""
        predicting = make(host, FencedStore(store, held), self._config, "")
        if held.lease:
            reading = asyncio.create_task(predicting.keeper.read.wait())
            losing = asyncio.create_task(held.over.wait())
            try:
                await asyncio.wait([reading, losing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (reading, losing):
                    task.cancel()
                if not predicting.keeper.restored:
                    await predicting.close()
            if not predicting.keeper.restored:
                raise NotLeader(held.lost)
        return predicting
