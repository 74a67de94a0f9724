"""Model store: saves what predictors learn in the store, and restores it after a restart.

Changes are collected and written every few seconds, in one transaction of bounded size: a lost second of learning costs
little, while a transaction per observation would load the store. An unreadable record is moved aside, where it can be
inspected and does no harm. While the store is unavailable only time is lost: pending records wait, by key, and the
predictors continue from memory.

Restoring takes seconds after a hundred thousand jobs. It runs in a thread, because nothing else uses the models that
are being restored; meanwhile calls are answered with the note that the models have not been read yet.

A `ModelFollower` writes nothing: it reads what another replica saves, and keeps following it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import structlog

from cotenant import fail_points
from cotenant.core.policy.protocols import Follows
from cotenant.rpc import gc_tuning
from cotenant.store.port import (
    VALUE_BYTES_MAX,
    Compare,
    Conflict,
    Delete,
    Entry,
    Operation,
    Put,
    Relisted,
    Store,
    StoreUnavailable,
)

log = structlog.get_logger()

T = TypeVar("T")

PREFIX = "predictor/"
ASIDE = "unreadable/predictor/"
RECORDS_MAX = 100  # per transaction; etcd's default limit is 128 operations
INLINE_RECORDS_MAX = 10  # records restored on the event loop; more are restored in a thread
BYTES_MAX = 1024 * 1024  # per transaction; etcd's default limit is 1.5 MiB


class Persistent(Protocol):
    """A part whose records can be dumped and restored, such as every predictor."""

    def dump(self) -> Mapping[str, bytes]:
        """Return the records that changed since the last dump, by key; an empty one is to be deleted."""

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore saved records; return the keys of unreadable ones."""


class ModelStore:
    """Saves and restores the records of each part under its name."""

    def __init__(self, store: Store, kept: Mapping[str, Persistent], on_ready: Callable[[bool], None]) -> None:
        self._store, self._kept, self._on_ready = store, kept, on_ready
        self._pending: dict[str, bytes] = {}
        self._records_max = RECORDS_MAX
        self._present = self._ready = False
        self._revision = 0
        self.restored = False
        self.read = asyncio.Event()  # set once it is restored

    async def run(self, pause_seconds: float) -> None:
        """Restore as soon as the store is available, then save changes, until cancelled."""
        while True:
            try:
                await (self.save() if self.restored else self.restore())
            except StoreUnavailable:
                pass  # logged by `_update_readiness`; retried after the pause
            except Exception:
                log.exception("model_store_failed")  # keep going after an unexpected error
            await asyncio.sleep(pause_seconds)

    async def restore(self) -> None:
        """Restore each part's records, and set unreadable ones aside."""
        listing = await self._track_store(self._store.list(PREFIX))
        self._revision = listing.revision
        for name, kept in self._kept.items():
            prefix = f"{PREFIX}{name}/"
            own = {entry.key.removeprefix(prefix): entry for entry in listing.entries if entry.key.startswith(prefix)}
            if len(own) > INLINE_RECORDS_MAX:
                named = await asyncio.to_thread(self._restore_records, name, kept, own)
            else:
                named = self._restore_records(name, kept, own)
            unread = [own[key] for key in named if key in own]
            log.info("records_restored", predictor=name, count=len(own) - len(unread))
            for entry in unread:
                await self._set_aside(entry)
        gc_tuning.refreeze()  # what was restored stays; the state of an earlier term does not
        self.restored = True
        self.read.set()
        self._update_readiness(present=True)

    async def save(self) -> bool:
        """Save changed records; return True if more are pending. With nothing to save, probe the store."""
        self._gather_changes()
        batch = _bounded(self._pending, self._records_max)
        operations: list[Operation] = [Put(key, value) if value else Delete(key) for key, value in batch.items()]
        if not operations:
            await self._track_store(self._store.get(PREFIX))
            return False
        await fail_points.reach("predictor.keeping")
        try:
            await self._track_store(self._store.transact((), operations))
            await fail_points.reach("predictor.kept")
        except ValueError as error:
            self._shrink_batch(batch, error)
        else:
            self._forget(batch)
        return bool(self._pending)

    async def save_all(self, within_seconds: float) -> None:
        """Save everything before shutdown, within a time limit."""
        try:
            async with asyncio.timeout(within_seconds):
                while self.restored and await self.save():
                    pass
        except (StoreUnavailable, TimeoutError) as error:
            log.warning(
                "records_not_saved", count=len(self._pending), error=str(error) or "the store did not answer in time"
            )

    def _shrink_batch(self, batch: Mapping[str, bytes], error: ValueError) -> None:
        """Reduce the batch size after the store refused a batch; a record that it refuses alone is dropped."""
        if len(batch) > 1:
            self._records_max = len(batch) // 2
        else:
            self._forget(batch)
            log.error("record_refused", key=next(iter(batch)), error=str(error))

    def _forget(self, batch: Mapping[str, bytes]) -> None:
        for key in batch:
            del self._pending[key]

    def _gather_changes(self) -> None:
        for name, kept in self._kept.items():
            try:
                dumped = kept.dump()
            except Exception as error:  # a predictor may raise anything
                log.error("predictor_failed", predictor=name, last_error=f"dump: {type(error).__name__}: {error}")
                continue
            for key, value in dumped.items():
                if len(value) > VALUE_BYTES_MAX:
                    log.error("record_too_large", predictor=name, key=key, bytes=len(value), bytes_max=VALUE_BYTES_MAX)
                else:
                    self._pending[f"{PREFIX}{name}/{key}"] = value

    def _restore_records(self, name: str, kept: Persistent, own: Mapping[str, Entry]) -> Iterable[str]:
        """Restore all records at once, or one by one if that fails; return the keys of unreadable ones."""
        records = {key: entry.value for key, entry in own.items()}
        try:
            return kept.restore(records)
        except Exception as error:  # a predictor may raise anything
            log.error("predictor_failed", predictor=name, last_error=f"restore: {type(error).__name__}: {error}")
        return [key for key, value in records.items() if not _readable(kept, key, value)]

    async def _set_aside(self, entry: Entry) -> None:
        """Move an unreadable record to a prefix that is not read, unless it has changed since."""
        aside = ASIDE + entry.key.removeprefix(PREFIX)
        moved = await self._track_store(
            self._store.transact(
                (Compare(entry.key, entry.mod_revision),), (Put(aside, entry.value), Delete(entry.key))
            )
        )
        if not isinstance(moved, Conflict):
            log.error("record_unreadable", key=entry.key, set_aside=aside, bytes=len(entry.value))

    async def _track_store(self, asked: Awaitable[T]) -> T:
        """Return the store's answer, and update readiness by whether it answered."""
        try:
            answer = await asked
        except StoreUnavailable as error:
            self._update_readiness(present=False, why=str(error))
            raise
        self._update_readiness(present=True)
        return answer

    def _update_readiness(self, *, present: bool, why: str = "") -> None:
        if self._present and not present:
            log.warning("store_unavailable", why=why)
        self._present = present
        if self._ready != (present and self.restored):
            self._ready = not self._ready
            self._on_ready(self._ready)


class ModelFollower(ModelStore):
    """Reads what another replica saves, first everything, then the changes; it writes nothing."""

    async def run(self, pause_seconds: float) -> None:
        """Restore as soon as the store is available, then follow it, until cancelled."""
        while True:
            try:
                if not self.restored:
                    await self.restore()
                await self.follow()
            except StoreUnavailable:
                pass  # logged by `_update_readiness`; retried after the pause
            except Exception:
                log.exception("model_follower_failed")
            await asyncio.sleep(pause_seconds)

    async def follow(self) -> None:
        """Apply what another replica saves, as it arrives."""
        async for news in self._store.watch(PREFIX, after_revision=self._revision):
            if isinstance(news, Relisted):
                records = {entry.key: entry.value for entry in news.entries}
            else:
                records = {change.key: change.value or b"" for change in news.changes}
            for name, kept in self._kept.items():
                prefix = f"{PREFIX}{name}/"
                own = {key.removeprefix(prefix): value for key, value in records.items() if key.startswith(prefix)}
                if own:
                    self._apply(name, kept, own)
            self._revision = news.revision

    async def save(self) -> bool:
        """Save nothing."""
        return False

    def _apply(self, name: str, kept: Persistent, own: Mapping[str, bytes]) -> None:
        try:
            unread = kept.follow(own) if isinstance(kept, Follows) else kept.restore(own)
        except Exception as error:  # a predictor may raise anything
            log.error("predictor_failed", predictor=name, last_error=f"restore: {type(error).__name__}: {error}")
        else:
            for key in unread:
                log.warning("record_unreadable", predictor=name, key=key)
        kept.dump()  # discard: another replica has already saved these changes

    async def _set_aside(self, entry: Entry) -> None:
        """Log the record; the replica that writes sets it aside."""
        log.warning("record_unreadable", key=entry.key)


def _bounded(pending: Mapping[str, bytes], records_max: int) -> dict[str, bytes]:
    """Return the oldest pending records that fit into one transaction."""
    batch: dict[str, bytes] = {}
    room_bytes = BYTES_MAX
    for key, value in pending.items():
        room_bytes -= len(key) + len(value)
        if batch and (room_bytes < 0 or len(batch) == records_max):
            break
        batch[key] = value
    return batch


def _readable(kept: Persistent, key: str, value: bytes) -> bool:
    try:
        return key not in kept.restore({key: value})
    except Exception:  # already logged for all records together
        return False
