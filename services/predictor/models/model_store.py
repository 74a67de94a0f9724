"""Keeps what predictors learn in the store, and gives it back after a restart.

What changed is gathered and written every few seconds, in one transaction of bounded size: a lost second of learning
costs little, a transaction per observation would cost the store much. A record that cannot be read is moved aside, so
that it can be looked at and does no harm. While the store is away nothing is lost but time: what is to be written
waits, by key, and the predictors go on from memory.

Restoring takes seconds where a hundred thousand jobs were learnt from. It is done in a thread, for nobody else touches
what is being restored, and calls are answered meanwhile, with that it has not been read yet.

A `Follower` writes nothing: it reads what another replica wrote, and goes on reading as that learns more.
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
RECORDS_MAX = 100  # in one transaction; etcd takes 128 operations unless told otherwise
AT_ONCE_MAX = 10  # records that are restored while others wait
BYTES_MAX = 1024 * 1024  # in one transaction; etcd takes 1.5 MiB unless told otherwise


class Kept(Protocol):
    """Something that can be written down and taken back, as every predictor can."""

    def dump(self) -> Mapping[str, bytes]:
        """What changed since the last dump, by key; empty where there is nothing left to keep."""

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was kept; names the records that could not be read."""


class Keeper:
    """Writes and restores the records of each kept thing under its name."""

    def __init__(self, store: Store, kept: Mapping[str, Kept], on_ready: Callable[[bool], None]) -> None:
        self._store, self._kept, self._on_ready = store, kept, on_ready
        self._pending: dict[str, bytes] = {}
        self._records_max = RECORDS_MAX
        self._present = self._ready = False
        self._revision = 0
        self.restored = False
        self.read = asyncio.Event()  # set once it is

    async def run(self, pause_seconds: float) -> None:
        """Restore as soon as the store is there, then keep what changes, until cancelled."""
        while True:
            try:
                await (self.keep() if self.restored else self.restore())
            except StoreUnavailable:
                pass  # told by `_tell`; once more after the pause
            except Exception:
                log.exception("predictor_keeper_failed")  # its work is too important to end with one surprise
            await asyncio.sleep(pause_seconds)

    async def restore(self) -> None:
        """Give each kept thing its records, and set those aside that it cannot read."""
        listing = await self._watched(self._store.list(PREFIX))
        self._revision = listing.revision
        for name, kept in self._kept.items():
            prefix = f"{PREFIX}{name}/"
            own = {entry.key.removeprefix(prefix): entry for entry in listing.entries if entry.key.startswith(prefix)}
            if len(own) > AT_ONCE_MAX:
                named = await asyncio.to_thread(self._give_back, name, kept, own)
            else:
                named = self._give_back(name, kept, own)
            unread = [own[key] for key in named if key in own]
            log.info("records_restored", predictor=name, count=len(own) - len(unread))
            for entry in unread:
                await self._set_aside(entry)
        gc_tuning.settle_again()  # what was restored stays; what an earlier term knew does not
        self.restored = True
        self.read.set()
        self._tell(present=True)

    async def keep(self) -> bool:
        """Write down what changed; True where more is left. With nothing to write, ask whether the store is there."""
        self._gather()
        batch = _bounded(self._pending, self._records_max)
        operations: list[Operation] = [Put(key, value) if value else Delete(key) for key, value in batch.items()]
        if not operations:
            await self._watched(self._store.get(PREFIX))
            return False
        await fail_points.reach("predictor.keeping")
        try:
            await self._watched(self._store.transact((), operations))
            await fail_points.reach("predictor.kept")
        except ValueError as error:
            self._shrink(batch, error)
        else:
            self._forget(batch)
        return bool(self._pending)

    async def keep_all(self, within_seconds: float) -> None:
        """Write down everything before the end, if the store takes it in time."""
        try:
            async with asyncio.timeout(within_seconds):
                while self.restored and await self.keep():
                    pass
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("records_not_kept", count=len(self._pending), error=str(error) or "the store took too long")

    def _shrink(self, batch: Mapping[str, bytes], error: ValueError) -> None:
        """Write less at once where the store takes less than we thought; what it does not take alone is dropped."""
        if len(batch) > 1:
            self._records_max = len(batch) // 2
        else:
            self._forget(batch)
            log.error("record_refused", key=next(iter(batch)), error=str(error))

    def _forget(self, batch: Mapping[str, bytes]) -> None:
        for key in batch:
            del self._pending[key]

    def _gather(self) -> None:
        for name, kept in self._kept.items():
            try:
                dumped = kept.dump()
            except Exception as error:  # whatever a stranger's predictor does
                log.error("predictor_failed", predictor=name, last_error=f"dump: {type(error).__name__}: {error}")
                continue
            for key, value in dumped.items():
                if len(value) > VALUE_BYTES_MAX:
                    log.error("record_too_large", predictor=name, key=key, bytes=len(value), bytes_max=VALUE_BYTES_MAX)
                else:
                    self._pending[f"{PREFIX}{name}/{key}"] = value

    def _give_back(self, name: str, kept: Kept, own: Mapping[str, Entry]) -> Iterable[str]:
        """Restore all records at once, or, where that fails as a whole, one by one; names the unreadable ones."""
        records = {key: entry.value for key, entry in own.items()}
        try:
            return kept.restore(records)
        except Exception as error:  # whatever a stranger's predictor does
            log.error("predictor_failed", predictor=name, last_error=f"restore: {type(error).__name__}: {error}")
        return [key for key, value in records.items() if not _readable(kept, key, value)]

    async def _set_aside(self, entry: Entry) -> None:
        """Move a record to where it is not read again, unless it has changed since."""
        aside = ASIDE + entry.key.removeprefix(PREFIX)
        moved = await self._watched(
            self._store.transact(
                (Compare(entry.key, entry.mod_revision),), (Put(aside, entry.value), Delete(entry.key))
            )
        )
        if not isinstance(moved, Conflict):
            log.error("record_unreadable", key=entry.key, set_aside=aside, bytes=len(entry.value))

    async def _watched(self, asked: Awaitable[T]) -> T:
        """Wait for the store, and tell whether it was there."""
        try:
            answer = await asked
        except StoreUnavailable as error:
            self._tell(present=False, why=str(error))
            raise
        self._tell(present=True)
        return answer

    def _tell(self, *, present: bool, why: str = "") -> None:
        if self._present and not present:
            log.warning("store_away", why=why)
        self._present = present
        if self._ready != (present and self.restored):
            self._ready = not self._ready
            self._on_ready(self._ready)


class Follower(Keeper):
    """Reads what another replica writes, first all of it, then what changes; it writes nothing itself."""

    async def run(self, pause_seconds: float) -> None:
        """Restore as soon as the store is there, then follow it, until cancelled."""
        while True:
            try:
                if not self.restored:
                    await self.restore()
                await self.follow()
            except StoreUnavailable:
                pass  # told by `_tell`; once more after the pause
            except Exception:
                log.exception("predictor_follower_failed")
            await asyncio.sleep(pause_seconds)

    async def follow(self) -> None:
        """Take in what another replica writes, as it comes."""
        async for news in self._store.watch(PREFIX, after_revision=self._revision):
            if isinstance(news, Relisted):
                told = {entry.key: entry.value for entry in news.entries}
            else:
                told = {change.key: change.value or b"" for change in news.changes}
            for name, kept in self._kept.items():
                prefix = f"{PREFIX}{name}/"
                own = {key.removeprefix(prefix): value for key, value in told.items() if key.startswith(prefix)}
                if own:
                    self._take(name, kept, own)
            self._revision = news.revision

    async def keep(self) -> bool:
        """Write nothing."""
        return False

    def _take(self, name: str, kept: Kept, own: Mapping[str, bytes]) -> None:
        try:
            unread = kept.follow(own) if isinstance(kept, Follows) else kept.restore(own)
        except Exception as error:  # whatever a stranger's predictor does
            log.error("predictor_failed", predictor=name, last_error=f"restore: {type(error).__name__}: {error}")
        else:
            for key in unread:
                log.warning("record_unreadable", predictor=name, key=key)
        kept.dump()  # what it says has changed has been written already, by another

    async def _set_aside(self, entry: Entry) -> None:
        """Leave it to the replica that writes."""
        log.warning("record_unreadable", key=entry.key)


def _bounded(pending: Mapping[str, bytes], records_max: int) -> dict[str, bytes]:
    """Take the oldest records that fit into one transaction."""
    batch: dict[str, bytes] = {}
    room_bytes = BYTES_MAX
    for key, value in pending.items():
        room_bytes -= len(key) + len(value)
        if batch and (room_bytes < 0 or len(batch) == records_max):
            break
        batch[key] = value
    return batch


def _readable(kept: Kept, key: str, value: bytes) -> bool:
    try:
        return key not in kept.restore({key: value})
    except Exception:  # told already, for all records together
        return False
