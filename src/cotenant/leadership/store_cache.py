"""An in-memory copy of the keys under a prefix, kept up to date by a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from cotenant.store.port import Change, Entry, Listing, Relisted, Store, StoreUnavailable
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

RETRY_SECONDS = 0.3


class StoreCache:
    """The entries under a prefix as of `revision`, which is 0 until the first read."""

    def __init__(
        self, store: Store, prefix: str, on_change: Callable[[Iterable[str]], None] = lambda keys: None
    ) -> None:
        self.prefix, self.revision = prefix, 0
        self.entries: dict[str, Entry] = {}
        self.following = False
        self._store, self._on_change = store, on_change
        self._advanced = asyncio.Event()  # set and cleared at once, to wake all current waiters

    async def run(self) -> None:
        """List the prefix, then watch it, until cancelled or the store is closed."""
        self.following = True
        try:
            while not self.revision:
                try:
                    self._replace(await self._store.list(self.prefix))
                except StoreUnavailable as error:
                    log.info("store_unavailable", prefix=self.prefix, error=str(error))
                    await asyncio.sleep(RETRY_SECONDS)
            async for news in self._store.watch(self.prefix, after_revision=self.revision):
                if isinstance(news, Relisted):
                    self._replace(Listing(news.entries, news.revision))
                else:
                    self._take(news.revision, news.changes)
        finally:
            self.following = False
            self._wake()

    async def reaches(self, revision: int, within_seconds: float) -> bool:
        """Wait until the cache has reached a revision; return False on timeout or if it is not running."""
        try:
            async with asyncio.timeout(within_seconds):
                while self.following and self.revision < revision:
                    await self._advanced.wait()
        except TimeoutError:
            return False
        return self.following

    async def changes(self) -> None:
        """Wait until the cache advances or stops."""
        await self._advanced.wait()

    def listing(self, prefix: str) -> Listing:
        """Return what is under a prefix, as `Store.list` would have at the cache's revision."""
        found = (entry for key, entry in self.entries.items() if key.startswith(prefix))
        return Listing(tuple(sorted(found, key=lambda entry: entry.key)), self.revision)

    def forget(self) -> None:
        """Drop all entries, once they are no longer used."""
        self.entries, self.revision = {}, 0

    def _replace(self, listing: Listing) -> None:
        gone = self.entries.keys() - {entry.key for entry in listing.entries}
        self.entries = {entry.key: entry for entry in listing.entries}
        self._advance(listing.revision, [*gone, *self.entries])

    def _take(self, revision: int, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.value is None:
                self.entries.pop(change.key, None)
            else:
                known = self.entries.get(change.key)
                created = known.create_revision if known else revision
                self.entries[change.key] = Entry(change.key, change.value, created, revision)
        self._advance(revision, [change.key for change in changes])

    def _advance(self, revision: int, keys: Iterable[str]) -> None:
        self.revision = revision
        self._on_change(keys)
        self._wake()

    def _wake(self) -> None:
        self._advanced.set()
        self._advanced.clear()
