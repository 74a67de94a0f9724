"""Replacing the certificates for etcd under a leader, its watches and its writes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs
from tests.conftest import require_etcd
from tests.contract.stores import drain, put
from tests.support.etcd_server import EtcdServer
from tests.unit.leadership.test_election import candidate, until, won

from cotenant.leadership.fenced_store import FencedStore
from cotenant.security import tls_files
from cotenant.security.certificates import Authority
from cotenant.security.subjects import Subject
from cotenant.security.tls_files import WatchedTlsFiles
from cotenant.store import etcd_connections
from cotenant.store.etcd import EtcdStore
from cotenant.store.open import tls_of
from cotenant.store.port import Changes, Committed, Put, Store, StoreUnavailable

WAIT_SECONDS = 30.0
KINDS = ("CA", "CERT", "KEY")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_files, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(etcd_connections, "LOOK_SECONDS", 0.05)


@dataclass
class Party:
    """A party with a certificate: its files, which keep their names."""

    directory: Path
    name: str

    @property
    def files(self) -> tuple[Path, Path, Path]:
        ca, cert, key = (self.directory / f"{self.name}.{kind.lower()}" for kind in KINDS)
        return ca, cert, key

    def believe(self, *authorities: Authority) -> None:
        _replace(self.files[0], b"".join(one.cert_path.read_bytes() for one in authorities))

    def issue(self, authority: Authority) -> None:
        made = authority.issue(Subject.parse(f"service/{self.name}"), ["127.0.0.1"], days=1)
        for path, new in zip(self.files[1:], (made.path, made.key_path), strict=True):
            _replace(path, new.read_bytes())

    @property
    def tls(self) -> WatchedTlsFiles:
        named = zip(KINDS, self.files, strict=True)
        return tls_of({f"COTENANT_ETCD_{kind}": str(path) for kind, path in named})

    @property
    def context(self) -> ssl.SSLContext:
        ca, cert, key = self.files
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(cert, key)
        return context


def _replace(path: Path, content: bytes) -> None:
    made = path.with_suffix(".new")
    made.write_bytes(content)
    made.replace(path)


@dataclass
class Cluster:
    """Members of etcd that authenticate clients and each other by certificates, and one client's files."""

    old: Authority
    new: Authority
    client: Party
    parties: list[Party]
    servers: list[EtcdServer] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        return [server.endpoint for server in self.servers]

    def start(self, directory: Path) -> None:
        for party in self.parties:
            flags = zip(("trusted-ca-file", "cert-file", "key-file"), party.files, strict=True)
            named = [f"--{whose}{flag}={path}" for flag, path in flags for whose in ("", "peer-")]
            self.servers.append(
                EtcdServer(
                    directory,
                    name=party.name,
                    arguments=(*named, "--client-cert-auth", "--peer-client-cert-auth"),
                    scheme="https",
                    context=self.client.context,
                )
            )
        for server in self.servers:
            server.peers = self.servers
            server.start(wait=False)
        for server in self.servers:
            server.wait_until_healthy()

    def connections(self) -> set[int]:
        """Return the local ports of this process's connections to the members."""
        ports = {server.client_port for server in self.servers}
        return {
            one.laddr.port
            for one in psutil.Process().net_connections("tcp")
            if one.raddr and one.raddr.port in ports and one.status == psutil.CONN_ESTABLISHED
        }


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield the requested members; all trust the old authority, which issued all certificates, and a new one."""
    require_etcd()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    for authority in (old, new):
        authority.create(str(authority.directory.name))
    members = [Party(tmp_path, f"etcd{number}") for number in range(request.param)]
    made = Cluster(old, new, Party(tmp_path, "client"), members)
    for party in (made.client, *members):
        party.believe(old, new)
        party.issue(old)
    try:
        made.start(tmp_path)
        yield made
    finally:
        for server in made.servers:
            server.kill()


@dataclass
class Writing:
    """A leader's writes, one after the other, and those with an unknown outcome."""

    store: Store
    committed: list[int] = field(default_factory=list)
    lost: int = 0

    async def run(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                outcome = await self.store.transact([], [Put("/w", b"%d" % number)])
            except StoreUnavailable:
                self.lost += 1
                continue
            assert isinstance(outcome, Committed)
            self.committed.append(outcome.revision)

    async def some(self) -> None:
        wanted = len(self.committed) + 5
        await until(lambda: len(self.committed) >= wanted)


async def watched(store: EtcdStore, after_revision: int, seen: list[int]) -> None:
    async with aclosing(store.watch("/w", after_revision=after_revision)) as updates:
        async for update in updates:
            assert isinstance(update, Changes)
            seen.append(update.revision)


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_leadership_and_watches_survive_the_replacement_of_the_authority(
    cluster: Cluster,
) -> None:
    store, seen = EtcdStore(cluster.endpoints, tls=cluster.client.tls), list[int]()
    watching = asyncio.create_task(watched(store, first := await put(store, "/w"), seen))
    async with candidate(store, "svc/leader", "a:1", ttl_seconds=2.0) as election:
        held = await won(election)
        holding = asyncio.create_task(election.hold(held))
        writing = Writing(FencedStore(store, held))
        written = asyncio.create_task(writing.run())
        await writing.some()
        await asyncio.sleep(held.lease.ttl_seconds / 2 if held.lease else 0)  # it was renewed over a connection too
        before = cluster.connections()

        for party in (*cluster.parties, cluster.client):
            party.issue(cluster.new)
        await until(lambda: (now := cluster.connections()) and not now & before)  # none of them shows what was
        await writing.some()
        assert writing.lost == 0

        cluster.client.believe(cluster.new)
        for party, server in zip(cluster.parties, cluster.servers, strict=True):
            party.believe(cluster.new)
            server.context = cluster.client.context
            await asyncio.to_thread(server.restart)
            await writing.some()
        written.cancel()
        assert not holding.done(), holding.result()
        assert election.leader
        assert election.leader.term == held.term
        await election.resign(held)
        await holding

    last = await put(store, "/w")
    await until(lambda: last in seen)
    watching.cancel()
    truth = await drain(store.watch("/w", after_revision=first), to_revision=last)
    assert seen == [update.revision for update in truth]
    assert set(writing.committed) <= set(seen)
    await store.close()
    cluster.client.believe(cluster.old, cluster.new)
    cluster.client.issue(cluster.old)
    stranger = EtcdStore(cluster.endpoints, tls=cluster.client.tls, timeout_seconds=0.5)
    with pytest.raises(StoreUnavailable):
        await stranger.get("/w")
    await stranger.close()


@pytest.mark.parametrize("cluster", [1], indirect=True)
async def test_damaged_or_untrusted_files_keep_the_existing_connections(cluster: Cluster, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    stranger.create()
    ca, cert, _ = cluster.client.files
    whole = {path: path.read_bytes() for path in cluster.client.files}
    store = EtcdStore(cluster.endpoints, tls=cluster.client.tls)
    lease = await store.grant(2.0)
    await put(store, "/kept", lease_id=lease.id)
    before = cluster.connections()
    with capture_logs() as told:

        async def told_once(event: str, *, after: str = "") -> None:
            await until(lambda: [one for one in told if one["event"] == event])
            told[:] = [one for one in told if one["event"] != after]
            for _ in range(4):
                await store.keep_alive(lease)  # over the thread's own connection
                await asyncio.sleep(2 * etcd_connections.LOOK_SECONDS)
            assert await store.get("/kept")
            assert [one["event"] for one in told] == [event]
            assert before <= cluster.connections()
            told.clear()

        for path, half in ((cert, whole[cert][:-30]), (ca, whole[ca][:-30]), (cert, b"")):
            _replace(path, half)  # at once: of a file that is being written, two different states may be rejected
            await told_once("tls_files_rejected")
            _replace(path, whole[path])
        cluster.client.issue(stranger)
        await told_once("store_tls_files_rejected", after="tls_files_reloaded")
        cluster.client.issue(cluster.new)
        await until(lambda: not before & cluster.connections())
    assert await store.get("/kept")
    await store.close()
