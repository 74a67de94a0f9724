"""Records of every kind in the store, and an identity provider's keys and tokens.

A service that starts on a damaged record names its key, and has done nothing; a service that accepts a record can work
with it. A token without a signature by the provider's key authenticates no user.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from tests.unit.services.mesh import spec
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.targets import Prepared, Target

from cotenant.codec.errors import Problem
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.leadership.leader_handlers import LeaderHandlers
from cotenant.leadership.leadership_term import leader_of
from cotenant.security.oidc import BadOidc, Oidc, OidcRules
from cotenant.services.placement.api.server import Placement, PlacementConfig
from cotenant.services.placement.cluster.live_records import ATTEMPTS, NODES
from cotenant.services.placement.placement_leadership import LEADER, PlacementLeadership
from cotenant.services.queue.jobs.archived_jobs import ARCHIVES, ArchivedJobs
from cotenant.services.queue.jobs.job_store import ARRAYS, JOBS, TENANTS, JobStore
from cotenant.services.queue.jobs.queue_state import State, stored_message
from cotenant.services.queue.jobs.removal_log import REMOVALS
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Entry, Put
from cotenant.store.schema import BadRecord, NewerSchema
from cotenant.v1 import job_pb2, node_service_pb2, resources_pb2, tenant_service_pb2

ISSUER = "https://login.example"
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
SEPARATOR = b"|"


def targets() -> Iterator[Target]:
    """Yield the targets."""
    refused = (BadRecord, NewerSchema)
    for name, key, load in (
        ("job", f"{JOBS}x", _queue),
        ("tenant", f"{TENANTS}x", _queue),
        ("array", f"{ARRAYS}x", _queue),
        ("removals", f"{REMOVALS}1", _queue),
        ("archive", f"{ARCHIVES}x", _past),
        ("node", f"{NODES}x", _placement),
        ("attempt", f"{ATTEMPTS}x", _placement),
    ):
        yield Target(f"{name} record", _of(name, key, load), refused)
    yield Target("leader record", lambda directory: Prepared(_leader, (good("leader"),)), refused)
    yield Target("request record", lambda directory: Prepared(_request, (good("request"),)), refused)
    yield Target("provider keys", _keys, (BadOidc,))
    yield Target("provider tokens", _tokens, (Problem,))


def good(name: str) -> bytes:
    """Return a record of each kind, as a service writes it."""
    task = resources_pb2.TaskAllocation(role="worker", core_ids=[0, 1], cpu_ids=[0, 1], memory_bytes=1 << 20)
    task.gpus.add(uuid="GPU-a", milli=500)
    allocation = resources_pb2.NodeAllocation(node_id="x", tasks=[task])
    attempt = job_pb2.Attempt(
        job_id="x", number=1, epoch=4, state=job_pb2.ATTEMPT_STATE_RUNNING, allocations=[allocation]
    )
    cores = [resources_pb2.Core(id=number, cpus=[number]) for number in range(4)]
    inventory = resources_pb2.Inventory(cores=cores, memory_bytes=1 << 30)
    for uuid in ("GPU-a", "GPU-b"):
        inventory.gpus.add(uuid=uuid, model="V100", memory_bytes=1 << 34, shareable=True)
    job = job_pb2.Job(id="x", spec=spec(gpus=1), phase=job_pb2.JOB_PHASE_QUEUED, attempt=attempt)
    removed = records_pb2.StoredRemoval(id="y", tenant="x")
    made: dict[str, Any] = {
        "job": records_pb2.StoredJob(schema_version=1, job=job, request_ids=["r"]),
        "tenant": records_pb2.StoredTenant(schema_version=1, tenant=tenant_service_pb2.Tenant(id="x", weight=2)),
        "array": records_pb2.StoredArray(schema_version=1, id="x", count=3),
        "removals": records_pb2.StoredRemovals(schema_version=1, jobs=[removed], floor=0),
        "archive": records_pb2.StoredArchive(schema_version=1, id="x", place="h:/a.sqlite"),
        "node": records_pb2.StoredNode(schema_version=1, node=node_service_pb2.Node(id="x", inventory=inventory)),
        "attempt": records_pb2.StoredAttempt(schema_version=1, attempt=attempt, spec=spec(gpus=1)),
        "leader": records_pb2.StoredLeader(schema_version=1, address="a:1", identity="ab"),
        "request": records_pb2.StoredRequest(schema_version=1, method="CreateJob", fingerprint=b"f", id="x"),
    }
    return bytes(made[name].SerializeToString())


def _of(name: str, key: str, load: Callable[[MemoryStore], Any]) -> Callable[[Path], Prepared]:
    whole = good(name)
    beside = {f"{NODES}x": good("node")} if name == "attempt" else {}
    kind: Any = getattr(records_pb2, f"Stored{name.capitalize()}")

    def prepare(directory: Path) -> Prepared:
        loop = asyncio.new_event_loop()
        drawer = Drawer(Random(name), {"id": ["x"], "node": ["x"]})

        async def started(data: bytes) -> None:
            store = MemoryStore()
            await store.transact([], [Put(place, content) for place, content in beside.items()])
            await store.transact([], [Put(key, data)])
            before = (await store.list("")).entries
            try:
                await load(store)
            except (BadRecord, NewerSchema) as error:
                left = [one for one in (await store.list("")).entries if one.key != LEADER]
                if left != list(before):
                    raise AssertionError("it had side effects") from error
                if key not in str(error):
                    raise AssertionError(f"the error does not name the key: {error}") from error
                raise

        def pack(data: bytes) -> bytes:
            """Make every other input a record of the kind with changed fields."""
            if zlib.crc32(data) % 2:
                return data
            return bytes(drawer.change(kind.FromString(whole)).SerializeToString())

        return Prepared(lambda data: loop.run_until_complete(started(data)), (whole,), pack=pack)

    return prepare


async def _queue(store: MemoryStore) -> None:
    """Load as the queue does, and read what was loaded."""
    state = State()
    job_store = JobStore(store, state)
    await job_store.load()
    "".join(job_id + tenant for job_id, tenant in job_store.removals.since(0))
    for record in state.records.values():
        stored_message(record).SerializeToString()
        state.row(record)


async def _past(store: MemoryStore) -> None:
    """Load archives as a new queue leader does."""
    await ArchivedJobs(store, None).start()


async def _placement(store: MemoryStore) -> None:
    """Load as a new placement leader does, recount the free resources, and release all attempts."""
    cluster = _reader()._read(await store.list(NODES), await store.list(ATTEMPTS))
    ledger = cluster.ledger
    if (ledger.free < 0).any() or (ledger.free > ledger.total).any() or (ledger._milli > WHOLE_GPU_MILLI).any():
        free = ledger.free.T.tolist(), ledger._milli.tolist()
        raise AssertionError(f"{free} are free of {ledger.total.T.tolist()}")
    for live in list(cluster.attempts.values()):
        cluster.release(live)
        cluster.forget(live.key[0])
    ledger = cluster.ledger
    if (ledger.free != ledger.total).any():
        raise AssertionError(f"{ledger.free.T.tolist()} are free of {ledger.total.T.tolist()} after all releases")


@cache
def _reader() -> PlacementLeadership:
    """Return the reader of placement's records; its construction takes a hundred times as long as reading one."""
    return Placement(LeaderHandlers(), MemoryStore(), PlacementConfig()).leadership


def _leader(data: bytes) -> None:
    leader_of(Entry(LEADER, data, 1, 1))


def _request(data: bytes) -> None:
    schema.read(records_pb2.StoredRequest, Entry("queue/requests/x", data, 1, 1))


# An identity provider ----------------------------------------------------------------------------------------------


def _document() -> bytes:
    shown = jwt.get_algorithm_by_name("ES256").to_jwk(KEY.public_key(), as_dict=True)
    return json.dumps({"keys": [{**shown, "kid": "e", "alg": "ES256", "use": "sig"}]}).encode()


def _keys(directory: Path) -> Prepared:
    path = directory / "jwks.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        Oidc(OidcRules(ISSUER, "cotenant", str(path)))

    rsa = (
        b'{"keys": [{"kty": "RSA", "kid": "r", "n": "sXchDaQebHnPiGvyDOAT4saGEUetSyo9MKLOoWFsueri23bO", "e": "AQAB"}]}'
    )
    return Prepared(run, (_document(), rsa))


def _tokens(directory: Path) -> Prepared:
    path = directory / "jwks.json"
    path.write_bytes(_document())
    oidc = Oidc(OidcRules(ISSUER, "cotenant", str(path)))
    claims = {"iss": ISSUER, "aud": "cotenant", "sub": "eve", "exp": time.time() + 3600, "nbf": 1.5, "iat": 5}
    claims |= {"cotenant_role": "user", "cotenant_tenants": ["lab"]}
    seeds = [
        json.dumps({"alg": algorithm, "kid": "e", "typ": "JWT"}).encode() + SEPARATOR + json.dumps(claims).encode()
        for algorithm in ("ES256", "none", "HS256", "RS256")
    ]

    def pack(data: bytes) -> bytes:
        """Sign it: half of the time as the provider does, else with another key, or not at all."""
        header, _, body = data.partition(SEPARATOR)
        signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (header, body))
        kind = zlib.crc32(data) % 6
        if kind == 5:
            return signed + b"." + data[:9]
        signature = jwt.get_algorithm_by_name("ES256").sign(signed, KEY if kind < 3 else OTHER)
        return signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")

    def run(data: bytes) -> None:
        oidc.check(data.decode(errors="replace"))
        signed, _, signature = data.rpartition(b".")
        raw = base64.urlsafe_b64decode(signature + b"==")
        if not jwt.get_algorithm_by_name("ES256").verify(signed, KEY.public_key(), raw):
            raise AssertionError("a token that the provider did not sign is accepted")

    return Prepared(run, seeds, pack=pack)
