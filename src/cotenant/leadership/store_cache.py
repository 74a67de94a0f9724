"""What a store holds under a prefix, kept up to date in memory by a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from cotenant.store.port import Change, Entry, Listing, Relisted, Store, StoreUnavailable

log = structlog.get_logger()

RETRY_SECONDS = 0.3


class Mirror:
    """The entries under a prefix as they were at `revision`; 0 until they have been read for the first time."""

    def __init__(
        self, store: Store, prefix: str, on_change: Callable[[Iterable[str]], None] = lambda keys: None
    ) -> None:
        self.prefix, self.revision = prefix, 0
        self.entries: dict[str, Entry] = {}
        self.following = False
        self._store, self._on_change = store, on_change
        self._advanced = asyncio.Event()  # set and cleared at once, to wake all who wait at that moment

    async def run(self) -> None:
        """Read what there is, then follow it, until cancelled or the store is closed."""
        self.following = True
        try:
            while not self.revision:
                try:
                    self._replace(await self._store.list(self.prefix))
                except StoreUnavailable as error:
                    log.info("store_away", prefix=self.prefix, error=str(error))
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
        """Wait until a revision has been taken in; False where that takes too long, or it is not followed."""
        try:
            async with asyncio.timeout(within_seconds):
                while self.following and self.revision < revision:
                    await self._advanced.wait()
        except TimeoutError:
            return False
        return self.following

    async def changes(self) -> None:
        """Wait until something is taken in, or nothing will be any more."""
        await self._advanced.wait()

    def listing(self, prefix: str) -> Listing:
        """Tell what is under a prefix, as `Store.list` would have at the mirror's revision."""
        found = (entry for key, entry in self.entries.items() if key.startswith(prefix))
        return Listing(tuple(sorted(found, key=lambda entry: entry.key)), self.revision)

    def forget(self) -> None:
        """Let go of all entries, once nobody follows them any more."""
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
