"""The store of a cluster: etcd, through the stubs and messages of `aetcd`.

Its client class hides what the port needs (the revision of a response, of a page, of a fragment), so this module makes
the calls itself. Calls that may be repeated are retried until their deadline; a transaction that may have been
committed is not.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.security.tls_files import WatchedTlsFiles
from cotenant.store.argument_checks import check_key, check_transaction, check_ttl
from cotenant.store.capacity import (
    FRAGMENTED_SHARE,
    PRESSED_SHARE,
    QUOTA_BYTES_DEFAULT,
    Capacity,
    etcd_capacity,
)
from cotenant.store.etcd_connections import Member
from cotenant.store.etcd_keep_alive import EtcdKeepAlive
from cotenant.store.etcd_members import (
    NO_SPACE,
    PAUSE_SECONDS_FIRST,
    PAUSE_SECONDS_MAX,
    EtcdMembers,
    Refused,
    store_error,
)
from cotenant.store.etcd_quota import read_quota
from cotenant.store.etcd_watch import ConnectionReplaced, HistoryCompacted, StreamBroken, follow
from cotenant.store.member_status import MemberStatus
from cotenant.store.port import (
    Changes,
    Committed,
    Compare,
    Conflict,
    Entry,
    Lease,
    LeaseLost,
    Listing,
    Operation,
    Put,
    Relisted,
    StoreRegressed,
    StoreUnavailable,
)
from cotenant.store.unknown_outcome import unless_outcome_lost
from cotenant.store.watermark import COMPARES_MAX, OPERATIONS_MAX, Sent, Watermark
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

PAGE_KEYS_FIRST = 64
PAGE_KEYS_MAX = 8_192
PAGE_BYTES_WANTED = 2 * 1024 * 1024
LOOSE_SHARE, LOOSE_BYTES = 0.5, 64 * 1024 * 1024  # beyond both, a member's file is worth defragmenting
DEFRAGMENT_SECONDS_MAX = 60.0
LISTING_ATTEMPTS = 5  # a listing starts over when its revision is compacted away before the last page


class EtcdStore:
    """The port over an etcd cluster, given as `host:port` of some or all of its members.

    Create it inside the event loop that uses it. Each call returns or fails within `timeout_seconds`. A watch leaves a
    member that has been silent for `silence_seconds_max`; below 7.5, etcd's `grpc-keepalive-min-time` must be lowered,
    or etcd disconnects clients that ping so often. With `tls` it uses TLS with the current files: when they change,
    connections are replaced without interrupting work.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_seconds: float = 5.0,
        silence_seconds_max: float = 15.0,
        tls: WatchedTlsFiles | None = None,
        quota_bytes: int = 0,
    ) -> None:
        """Connect at the first call. `quota_bytes` is etcd's `--quota-backend-bytes`; 0: read it from etcd."""
        self._endpoints, self._tls, self._quota_bytes = tuple(endpoints), tls, quota_bytes
        self._keep_alives = EtcdKeepAlive(endpoints, silence_seconds_max, tls)
        self._members = EtcdMembers(
            endpoints,
            timeout_seconds=timeout_seconds,
            silence_seconds_max=silence_seconds_max,
            tls=tls,
            on_moved=self._keep_alives.release_old,
        )
        self._timeout_seconds = timeout_seconds
        self.watermark: Watermark | None = None  # set by the identity check, which detects a regression

    async def get(self, key: str) -> Entry | None:
        """Read one key, linearizably."""
        check_key(key)
        sent = self.watermark.sent() if self.watermark else None
        page = await self._range(rpc.RangeRequest(key=key.encode()), sent)
        return entry_of(page.kvs[0]) if page.kvs else None

    async def list(self, prefix: str, *, checked: bool = True) -> Listing:
        """Read all keys under a prefix, page by page, all at the revision of the first.

        Without `checked` it is read even if the store has regressed.
        """
        for _ in range(LISTING_ATTEMPTS):
            if listing := await self._list_once(prefix, checked=checked):
                return listing
        raise StoreUnavailable(f"etcd compacts its history faster than {prefix!r} can be read")

    async def _list_once(self, prefix: str, *, checked: bool) -> Listing | None:
        key, range_end = range_of(prefix)
        entries: list[Entry] = []
        revision, keys_max = 0, PAGE_KEYS_FIRST
        sent = self.watermark.sent() if self.watermark and checked else None
        while True:
            request = rpc.RangeRequest(key=key, range_end=range_end, limit=keys_max, revision=revision)
            try:
                page = await self._range(request, sent)
            except Refused as refusal:
                if refusal.is_compacted or refusal.is_in_future:
                    return None
                if not refusal.is_message_too_large or keys_max == 1:
                    raise
                keys_max //= 2
                continue
            revision = revision or page.header.revision
            entries.extend(map(entry_of, page.kvs))
            if not page.more:
                return Listing(tuple(entries), revision)
            key = page.kvs[-1].key + b"\0"
            keys_max = next_page(keys_max, page.ByteSize())

    async def _range(self, request: Any, sent: Sent | None) -> Any:
        page = await self._members.call(lambda member, seconds: member.kv.Range(request, timeout=seconds), repeat=True)
        self._members.raft_term = page.header.raft_term
        if self.watermark and sent:
            self.watermark.check(page.header.revision, sent)
        return page

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Operation], *, checked: bool = True
    ) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none.

        Without `checked` it is sent even if the store is not trusted.
        """
        check_transaction(compares, operations)
        mark = self.watermark if checked else None
        turn = mark.turn if mark else 0
        while True:
            if mark and (not mark.armed or mark.turn != turn):
                raise StoreUnavailable("the store was checked again; nothing was written")
            request = rpc.TxnRequest(
                compare=[compare_of(compare) for compare in compares],
                success=[operation_of(operation) for operation in operations],
            )
            sent = add_progress(request, mark) if mark else None
            reply = await self._transact(request)
            began = check_progress(reply, sent, mark) if mark and sent else 0
            if not began or not mark or not mark.on_new_era or any(one.key == mark.era_key for one in compares):
                outcome = Committed if reply.succeeded else Conflict
                return outcome(reply.header.revision)
            await mark.on_new_era(began)

    async def _transact(self, request: Any) -> Any:
        asked: list[Member] = []

        def ask(member: Member, seconds: float) -> Any:
            asked.append(member)
            return member.kv.Txn(request, timeout=seconds)

        try:
            async with unless_outcome_lost(self._members, asked):
                reply = await self._members.call(ask, repeat=False)
        except Refused as refusal:
            if refusal.is_lease_unknown:
                raise LeaseLost("a put names an expired lease; nothing was written") from refusal
            raise
        self._members.raft_term = reply.header.raft_term
        return reply

    async def watch(self, prefix: str, *, after_revision: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield what is committed under a prefix after a revision, through restarts, until the store is closed."""
        position, pause_seconds = after_revision, PAUSE_SECONDS_FIRST
        while not self._members.closing.is_set():
            try:
                async with aclosing(self._follow(prefix, position)) as updates:
                    async for update in updates:
                        if self._members.closing.is_set():
                            return
                        position, pause_seconds = update.revision, PAUSE_SECONDS_FIRST
                        yield update
            except ConnectionReplaced:
                continue
            except (StreamBroken, StoreUnavailable) as error:
                if not self._members.closing.is_set():
                    log.warning("store_watch_interrupted", prefix=prefix, revision=position, error=str(error))
                await self._members.pause(pause_seconds)
                pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)

    async def _follow(self, prefix: str, position: int) -> AsyncGenerator[Changes | Relisted, None]:
        """Yield from one stream until it breaks, or a listing if the history is compacted."""
        member = await self._members.ready(self._timeout_seconds)
        key, range_end = range_of(prefix)
        stream = follow(member.link, key, range_end, after_revision=position, timeout_seconds=self._timeout_seconds)
        try:
            async with aclosing(stream):
                async for changes in stream:
                    yield changes
        except HistoryCompacted:
            listing = await self.list(prefix)
            yield Relisted(listing.revision, listing.entries)
        except StreamBroken:
            self._members.leave(member)
            raise
        except asyncio.CancelledError:
            self._members.raise_if_cut_off()
            raise

    async def grant(self, ttl_seconds: float) -> Lease:
        """Grant a lease of whole seconds, and at least etcd's minimum from its election timeout."""
        check_ttl(ttl_seconds)
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_seconds))
        reply = await self._members.call(
            lambda member, seconds: member.lease.LeaseGrant(request, timeout=seconds), repeat=True
        )
        return Lease(reply.ID, float(reply.TTL))

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Restart the lease's time to live; for `for_seconds` a thread repeats it, even if the event loop is busy."""
        promise = self._keep_alives.ask(lease, timeout_seconds=self._timeout_seconds, for_seconds=for_seconds)
        await asyncio.wrap_future(promise)

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease and delete its keys."""
        self._keep_alives.drop(lease)
        request = rpc.LeaseRevokeRequest(ID=lease.id)
        try:
            await self._members.call(
                lambda member, seconds: member.lease.LeaseRevoke(request, timeout=seconds), repeat=True
            )
        except Refused as refusal:
            if not refusal.is_lease_unknown:
                raise

    async def compact(self, revision: int) -> None:
        """Compact the history up to and including a revision.

        Waits until one member has dropped it and committed that, so that what comes next can use the space.
        """
        request = rpc.CompactionRequest(revision=revision, physical=True)
        try:
            await self._members.call(lambda member, seconds: member.kv.Compact(request, timeout=seconds), repeat=True)
        except Refused as refusal:
            if not refusal.is_compacted:
                raise

    async def defragment(self) -> Sequence[str]:
        """Defragment members with half or more of their file unused, one after another; return their endpoints."""
        done = []
        quota = await self._quota()
        for member in await self._members.each_loose(lambda size, in_use: _is_loose(size, in_use, quota)):
            try:
                with member.called():
                    await member.maintenance.Defragment(rpc.DefragmentRequest(), timeout=DEFRAGMENT_SECONDS_MAX)
            except rpc.AioRpcError as error:
                raise store_error(error, member.endpoint) from error
            done.append(member.endpoint)
        return done

    async def capacity(self) -> Capacity:
        """Return how full the fullest member is: once a member is at its quota nothing can be written."""
        statuses = await self._members.statuses()
        quota = await self._quota()
        alarms = "; ".join(sorted({error for status in statuses.values() for error in status.errors}))
        fullest = max(statuses.values(), key=lambda status: status.dbSize)
        full = f"etcd has used up its quota (alarm {NO_SPACE})" if NO_SPACE in alarms else ""
        return replace(
            etcd_capacity(fullest.dbSize, fullest.dbSizeInUse, quota, full),
            revision=max(status.header.revision for status in statuses.values()),
            endpoints=tuple(f"{'https' if self._tls else 'http'}://{one}" for one in self._endpoints),
            flags=_flags(self._tls) if self._tls else (),
        )

    async def _quota(self) -> int:
        """Return the members' quota: the operator's, else a member's, else etcd's default."""
        if not self._quota_bytes:
            self._quota_bytes = await read_quota(next(iter(self._members)).endpoint, self._tls)
        return self._quota_bytes or QUOTA_BYTES_DEFAULT

    async def member_statuses(self) -> Sequence[MemberStatus]:
        """Return the status of each member."""
        return await self._members.member_statuses()

    async def close(self) -> None:
        """End all watches and calls, and close the connections."""
        await asyncio.gather(self._members.close(), asyncio.to_thread(self._keep_alives.close))


def _flags(tls: WatchedTlsFiles) -> tuple[str, ...]:
    """Return the flags with which etcdctl uses the same certificates."""
    files = tls.files
    named = (("--cacert", files.ca), ("--cert", files.cert), ("--key", files.key))
    return tuple(f"{flag}={path}" for flag, path in named if path)


def _is_loose(size: int, in_use: int, quota: int) -> bool:
    """Return whether a member's file is worth defragmenting: half of it is unused, or less if its quota is near.

    >>> [_is_loose(*each, 2**30) for each in ((2**29 + 1, 2**28), (2**29 + 1, 2**29), (2**25, 1))]
    [True, False, False]
    """
    loose = size - in_use
    near = size >= PRESSED_SHARE * quota and loose >= FRAGMENTED_SHARE * size
    return near or (size >= LOOSE_BYTES and loose >= LOOSE_SHARE * size)


def range_of(prefix: str) -> tuple[bytes, bytes]:
    """Return the first key of a prefix and the first key after it; for an empty prefix, etcd's range of all keys.

    >>> range_of("jobs/"), range_of("")
    ((b'jobs/', b'jobs0'), (b'\\x00', b'\\x00'))
    """
    if not prefix:
        return b"\0", b"\0"
    key = prefix.encode()
    return key, key[:-1] + bytes([key[-1] + 1])  # UTF-8 has no byte 255, so this never overflows


def next_page(keys: int, page_bytes: int) -> int:
    """Return how many keys to request next, so that a page comes near the target size.

    >>> next_page(64, 64 * 1024), next_page(64, 64 * 1024 * 1024)
    (256, 2)
    """
    fitting = keys * PAGE_BYTES_WANTED // max(1, page_bytes)
    return max(1, min(fitting, 4 * keys, PAGE_KEYS_MAX))


def entry_of(kv: Any) -> Entry:
    """Decode a key-value pair."""
    return Entry(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision)


def compare_of(compare: Compare) -> Any:
    """Encode a comparison."""
    return rpc.Compare(
        key=compare.key.encode(),
        target=rpc.Compare.MOD,
        result=rpc.Compare.EQUAL,
        mod_revision=compare.mod_revision,
    )


def add_progress(request: Any, mark: Watermark) -> Sent:
    """Add the progress key to a transaction, and conditions that an older store fails; return what is expected."""
    key = mark.progress_key.encode()
    puts = 0 < len(request.success) <= OPERATIONS_MAX
    if puts:
        request.success.append(rpc.RequestOp(request_put=rpc.PutRequest(key=key)))
    room = COMPARES_MAX - len(request.compare)
    progress = mark.progress if room > 0 else 0
    era, era_written = (mark.era, mark.era_written) if room > 1 else (b"", 0)
    if progress:
        condition = {"target": rpc.Compare.MOD, "result": rpc.Compare.GREATER, "mod_revision": progress - 1}
        request.compare.append(rpc.Compare(key=key, **condition))
    if era:
        condition = {"target": rpc.Compare.MOD, "result": rpc.Compare.EQUAL, "mod_revision": era_written}
        request.compare.append(rpc.Compare(key=mark.era_key.encode(), **condition))
    for name in (mark.progress_key, mark.era_key):
        request.failure.append(rpc.RequestOp(request_range=rpc.RangeRequest(key=name.encode())))
    return replace(mark.sent(), progress=progress, era=era, era_written=era_written, puts=puts)


def check_progress(reply: Any, sent: Sent, mark: Watermark) -> int:
    """Handle the response to a transaction; return the revision of a newer era that rejected it, or 0.

    Raises:
        StoreRegressed: the store lacks what this process had seen there when it sent the transaction.
        StoreUnavailable: the store was distrusted or trusted again in between.
    """
    mark.check(reply.header.revision, sent)
    if reply.succeeded:
        if sent.puts:
            mark.written(reply.header.revision, sent)
        return 0
    progress, era = (int([*(kv.mod_revision for kv in one.response_range.kvs), 0][0]) for one in reply.responses)
    if progress < sent.progress:
        text = f"the store lacks the last write that this process knows of, at revision {sent.progress}"
        raise StoreRegressed(text)
    if not sent.era or era == sent.era_written:
        return 0
    if era < sent.era_written:
        raise StoreRegressed(f"the store lacks the era of revision {sent.era_written} that this process has seen")
    return era


def operation_of(operation: Operation) -> Any:
    """Encode an operation."""
    key = operation.key.encode()
    if isinstance(operation, Put):
        return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=operation.value, lease=operation.lease_id))
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
