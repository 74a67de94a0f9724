"""Input of `cotenant up`, `cotenant tokens` and `cotenant store`: agents' answers, notes of a mesh, an older store."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.records import _reader, good
from tests.verification.fuzz.store_files import _damaged, _good_archive, _write
from tests.verification.fuzz.targets import Made, Prepared, Target, file_target

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.cli.mesh.agent_processes import AgentProcess
from cotenant.cli.mesh.shared_identity import MARK_FILE, check_token_for
from cotenant.cli.mesh.store_losses import archived, found_on_nodes, plan
from cotenant.cli.outcome import CommandError
from cotenant.node_agent.__main__ import BadSettings, ChildSettings
from cotenant.node_agent.control.agent_config import AgentConfig
from cotenant.security.tls_files import TlsFiles
from cotenant.services.placement.cluster.live_records import ATTEMPTS, NODES
from cotenant.services.queue.jobs.job_store import JOBS, JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put, Relisted
from cotenant.store.regression_acceptance import accept
from cotenant.store.schema import BadRecord, NewerSchema
from cotenant.store.spec_parts import DATA, SpecStore, kind_of
from cotenant.v1 import job_pb2

ANSWERS = (b'{"ready": true}\n', b'{"error": "another agent is running", "bad_settings": false}\n', b"")
KEY = f"{JOBS}x"


def targets() -> Iterator[Target]:
    """Yield the targets."""
    config = AgentConfig("a", Path("/a"), "127.0.0.1:1", cpus=(0, 1), hidden=(Path("/b"),), users={"eve": "root"})
    lines = [ChildSettings(config, tls, 1024).to_line() for tls in (None, TlsFiles(Path("/ca.pem"), Path("/c")))]
    yield Target("agent settings", lambda directory: Prepared(_settings, lines), (BadSettings,))
    yield Target("agent answer", _answer)
    yield Target("identity.json", file_target(MARK_FILE, _token, (b'{"only_user": "ann"}',)), (CommandError,))
    yield Target("spec parts", _parts, (BadRecord,))
    yield Target("divided record", _divided, (BadRecord, NewerSchema))
    newer = (NewerSchema,)
    yield Target("job of an older store", _older(f"{JOBS}x", records_pb2.StoredJob, "job"), newer)
    yield Target("attempt of an older store", _older(f"{ATTEMPTS}x", records_pb2.StoredAttempt, "attempt"), newer)
    yield Target("assignment of an older store", _assigned)
    yield Target("stored attempt name", lambda directory: Prepared(_kept(directory), (b"x-1", b"job-2-17")))
    yield Target("archive of an older store", _archived)


def _settings(data: bytes) -> None:
    """Accepted settings can be written again."""
    ChildSettings.from_line(data).to_line()


def _answer(directory: Path) -> Prepared:
    """An agent's pipe: output of libraries is not an answer."""
    loop = asyncio.new_event_loop()

    async def run_one(data: bytes) -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        os.write(writer, data)
        os.close(writer)
        process = AgentProcess.__new__(AgentProcess)
        process.node_id = "n"
        process._process = SimpleNamespace(stdout=os.fdopen(reader, "rb"))  # type: ignore[assignment]  # the used subset of a process
        answer = await process.answer()
        if not isinstance(answer, dict) or (answer and not answer.keys() & {"ready", "error"}):
            raise AssertionError(f"{answer!r} is accepted as an answer")

    return Prepared(lambda data: loop.run_until_complete(run_one(data)), (*ANSWERS, b"a log line\n" + ANSWERS[0]))


def _token(path: Path) -> None:
    with patch("os.geteuid", return_value=1000):  # root may issue tokens to every user
        for name in ("None", "True", "eve"):
            if not check_token_for(name, path.parent, insist=False):
                raise AssertionError(f"the mesh is said to belong to {name!r}")


# Spec parts --------------------------------------------------------------------------------------------------------


def _large() -> bytes:
    record = records_pb2.StoredJob.FromString(good("job"))
    spec = record.job.spec
    spec.command[:] = ["sh", "-c", "x" * 9000]
    spec.environment["A"] = "b"
    return record.SerializeToString()


async def _kept_apart() -> tuple[bytes, str, bytes]:
    """Return a record without its parts, their key, and the parts."""
    inner = MemoryStore()
    await SpecStore(inner).transact([], [Put(KEY, _large())])
    (parts,) = (await inner.list(DATA)).entries
    slim = await inner.get(KEY)
    assert slim
    return slim.value, parts.key, parts.value


async def _store_of(slim: bytes, key: str, parts: bytes) -> SpecStore:
    inner = MemoryStore()
    await inner.transact([], [Put(key, parts)])
    await inner.transact([], [Put(KEY, slim)])
    return SpecStore(inner)


async def _read_in_each_way(store: SpecStore) -> bytes:
    """Read by key, prefix and watch; all return the same, or raise the same."""
    seen: list[bytes | BadRecord] = []

    async def one() -> bytes:
        entry = await store.get(KEY)
        assert entry
        return entry.value

    async def listed() -> bytes:
        return (await store.list(JOBS)).entries[0].value

    async def watched() -> bytes:
        updates = store.watch(JOBS, after_revision=1)
        try:
            async for update in updates:
                for run_one in update.entries if isinstance(update, Relisted) else update.changes:
                    if run_one.value is not None:
                        return run_one.value
        finally:
            await updates.aclose()
        raise AssertionError("the watch reports no change")

    for way in (one, listed, watched):
        try:
            seen.append(await asyncio.wait_for(way(), 5))
        except BadRecord as error:
            if KEY not in str(error):
                raise AssertionError(f"the error does not name the key: {error}") from error
            seen.append(error)
    first = seen[0]
    if isinstance(first, BadRecord) and "missing parts" in str(first):
        raise first  # a watch takes it for one deleted in between
    if any(one != first for one in seen[1:] if isinstance(first, bytes) or isinstance(one, bytes)):
        raise AssertionError(f"ways of reading differ: {[str(one)[:80] for one in seen]}")
    if isinstance(first, BadRecord):
        raise first
    return first


def _parts(directory: Path) -> Prepared:
    """Damaged parts of a valid record: a job never runs another command than its own."""
    loop = asyncio.new_event_loop()
    slim, key, parts = loop.run_until_complete(_kept_apart())

    async def run(data: bytes) -> None:
        value = await _read_in_each_way(await _store_of(slim, key, data))
        if records_pb2.StoredJob.FromString(value) != records_pb2.StoredJob.FromString(_large()):
            raise AssertionError("a job has another spec than its own")

    return Prepared(lambda data: loop.run_until_complete(run(data)), (parts,))


def _divided(directory: Path) -> Prepared:
    """A damaged record with valid parts; what can be decoded can be written, divided again and garbage-collected."""
    loop = asyncio.new_event_loop()
    slim, key, parts = loop.run_until_complete(_kept_apart())

    async def run(data: bytes) -> None:
        store = await _store_of(data, key, parts)
        value = await _read_in_each_way(store)
        await store.transact([], [Put(KEY, value)])  # unchanged: undecodable records are kept whole
        await store.collect_parts()
        entry = await store.get(KEY)
        assert entry
        kind = kind_of(KEY)
        assert kind
        schema.read(kind, entry)

    return Prepared(lambda data: loop.run_until_complete(run(data)), (slim, _large()))


# A store that went back in time ------------------------------------------------------------------------------------


def _entries() -> dict[str, bytes]:
    return {f"{NODES}x": good("node"), f"{JOBS}x": good("job"), f"{ATTEMPTS}x": good("attempt")}


async def _accepted(entries: dict[str, bytes], state_dir: Path, mesh: dict[str, job_pb2.Job], damaged: str) -> None:
    """Plan and accept; only the damaged record may keep services from leading."""
    store = MemoryStore()
    for key, value in entries.items():
        await store.transact([], [Put(key, value)])
    planned = plan((await store.list("")).entries, found_on_nodes(state_dir), mesh, {"x": "SUCCEEDED"})
    await accept(store, [], planned.changes)
    for load in (_queue, _placement):
        try:
            await load(SpecStore(store))
        except (BadRecord, NewerSchema) as error:
            if not damaged or damaged not in str(error):
                raise AssertionError(f"no service can lead: {error}") from error


async def _queue(store: SpecStore) -> None:
    await JobStore(store, State()).load()


async def _placement(store: SpecStore) -> None:
    _reader()._read(await store.list(NODES), await store.list(ATTEMPTS))


def _assignment() -> agent_pb2.Assignment:
    attempt = records_pb2.StoredAttempt.FromString(good("attempt"))
    return agent_pb2.Assignment(
        job_id="x", number=2, epoch=4, allocation=attempt.attempt.allocations[0], spec=attempt.spec, world_size=1
    )


def _place(directory: Path, name: str = "x-2") -> Path:
    path = directory / "nodes" / "x" / "attempts" / name
    path.mkdir(parents=True, exist_ok=True)
    return path / "assignment"


def _older(key: str, kind: type[records_pb2.StoredJob | records_pb2.StoredAttempt], name: str) -> Made:
    """A damaged record of the store; the mesh does not know the job, knows it, or the node has its next attempt."""

    def prepare(directory: Path) -> Prepared:
        loop, drawer = asyncio.new_event_loop(), Drawer(Random(key), {"id": ["x"], "node": ["x"]})
        whole, job = good(name), records_pb2.StoredJob.FromString(good("job")).job
        _place(directory).write_bytes(_assignment().SerializeToString())

        def run(data: bytes) -> None:
            for mesh in ({}, {"x": job}):
                for state_dir in (directory, directory / "none"):
                    loop.run_until_complete(_accepted({**_entries(), key: data}, state_dir, dict(mesh), key))

        def pack(data: bytes) -> bytes:
            return data if len(data) % 2 else drawer.change(kind.FromString(whole)).SerializeToString()

        return Prepared(run, (whole,), pack=pack)

    return prepare


def _assigned(directory: Path) -> Prepared:
    """A damaged assignment on a node, with and without a record of the job: what is written can be read."""
    loop, path = asyncio.new_event_loop(), _place(directory)
    drawer = Drawer(Random("assigned"), {"id": ["x"], "node": ["x"]})
    whole = _assignment().SerializeToString()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        for entries in (_entries(), {f"{NODES}x": good("node")}):
            loop.run_until_complete(_accepted(entries, directory, {}, ""))

    def pack(data: bytes) -> bytes:
        changed = drawer.change(agent_pb2.Assignment.FromString(whole))
        return data if len(data) % 2 else changed.SerializeToString()

    return Prepared(run, (whole,), pack=pack)


def _kept(directory: Path) -> Callable[[bytes], None]:
    kept = directory / "nodes" / "x" / "kept"
    kept.mkdir(parents=True)

    def run(data: bytes) -> None:
        name = os.fsdecode(data.replace(b"\0", b"").replace(b"/", b"")[:200])
        if name in ("", ".", ".."):
            return
        (kept / name).mkdir()
        try:
            for job_id, number in found_on_nodes(directory).over:
                plan([], found_on_nodes(directory))
                json.dumps([job_id, number])
        finally:
            (kept / name).rmdir()

    return run


def _archived(directory: Path) -> Prepared:
    archive, path = _good_archive(directory), directory / "archive.sqlite"

    def run(data: bytes) -> None:
        _write(path, data)
        for phase in archived(path, ["j0", "j1", "x"]).values():
            if not isinstance(phase, str):
                raise AssertionError(f"a phase of {phase!r}")
            phase.encode()

    return Prepared(run, (archive,), pack=lambda data: _damaged(archive, data, directory, ("jobs",)))
