"""Replica of the predictor: its parts as a leader and as a follower.

All replicas have the same models: the leader takes observations and saves what it learns; followers read that and
answer all other calls themselves, even while there is no leader. A new leader first restores everything that was saved;
until then it keeps answering with its models as a follower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leader_handlers import LeaderHandlers
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.leadership.routing_table import ROUTES, Route
from cotenant.leadership.store_cache import StoreCache
from cotenant.rpc.server import Host
from cotenant.services.predictor.api.server import SERVICE, Config, RunningPredictor, chain_of, make
from cotenant.services.predictor.models.failure_log import FailureLog
from cotenant.store.port import NotLeader, Store

LEADER = "predictor/leader"


class PredictorFollower:
    """A following predictor."""

    def __init__(self, store: Store, config: Config, on_serving: Callable[[], None]) -> None:
        self._stage = LeaderHandlers(on_serving)
        self._predictor = make(self._stage, store, config, "the leader")

    @property
    def serves(self) -> bool:
        """Whether the saved models have been restored."""
        return self._stage.serving[SERVICE]

    def take(self, cache: StoreCache, keys: Iterable[str]) -> None:
        """Ignore the cached records; the predictor watches its records itself."""

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._predictor.close()

    async def answer(self, path: str, request: bytes, context: Any) -> bytes | None:
        """Answer a call that every replica can answer; None for others."""
        return await self._stage.answer(path, request, context) if ROUTES[path] is Route.ANY else None


class PredictorReplica:
    """Makes a leading predictor for each leadership term, and a following one in between."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store, self._config = store, config

    def check(self) -> None:
        """Check the configuration before the election.

        Raises:
            UnknownPolicy, BadOption, ValueError: see `chain_of`.
        """
        chain_of(self._config, FailureLog())

    def read(self, on_serving: Callable[[], None]) -> PredictorFollower:
        """Return a predictor that follows."""
        return PredictorFollower(self._store, self._config, on_serving)

    async def lead(self, host: Host, store: Store, held: HeldTerm) -> RunningPredictor:
        """Return a leading predictor; after another leader, only once everything that it saved has been restored."""
        predicting = make(host, FencedStore(store, held), self._config, "")
        if held.lease:
            reading = asyncio.create_task(predicting.model_store.read.wait())
            losing = asyncio.create_task(held.over.wait())
            try:
                await asyncio.wait([reading, losing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (reading, losing):
                    task.cancel()
                if not predicting.model_store.restored:
                    await predicting.close()
            if not predicting.model_store.restored:
                raise NotLeader(held.lost)
        return predicting
