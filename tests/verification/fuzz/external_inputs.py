"""Input of clients and tools from elsewhere: displayed answers, providers' documents, keys, environments."""

from __future__ import annotations

import asyncio
import json
import os
import socketserver
import threading
import zlib
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from tests.verification.fuzz.calls import methods
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.records import _document as keys_document
from tests.verification.fuzz.targets import Prepared, Target, file_target, within

from cotenant.cli import views
from cotenant.cli.connection import access_of
from cotenant.cli.flags import Flags
from cotenant.cli.jobs import estimate_view as estimate_view_module
from cotenant.cli.jobs import explain, failures, list_jobs, show
from cotenant.cli.mesh import policies, replicas, tenants
from cotenant.cli.nodes import incidents, nodes
from cotenant.client.errors import InvalidArgument
from cotenant.codec import errors
from cotenant.codec.errors import Problem, Violation
from cotenant.history import recording
from cotenant.history.events import Began
from cotenant.history.stored import commit_of
from cotenant.reproduction.cache import _read as read_kept
from cotenant.rpc.access import AccessError
from cotenant.rpc.paging import page_of
from cotenant.security.certificates import Authority, BadCertificate
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles
from cotenant.security.identity import CALLER, OPERATOR, Identity, acting_identity, bearer_token, on_behalf_header
from cotenant.security.oidc import Oidc, OidcRules
from cotenant.security.permissions import Role
from cotenant.security.subjects import Subject
from cotenant.storage.v1 import records_pb2
from cotenant.store.open import open_raw, tls_of
from cotenant.store.port import Change, Changes, StoreUnavailable
from cotenant.transcoding import shipped_protos
from cotenant.transcoding.answer_json import INLINE_BYTES_MAX
from cotenant.transcoding.http_errors import HttpError
from cotenant.transcoding.http_routes import Routes
from cotenant.transcoding.request_json import read_request
from cotenant.v1.job_pb2 import JobSpec
from cotenant.v1.process_service_pb2 import GetProcessResponse
from cotenant.web.actions import changed, read_wanted
from cotenant.web.lab import read_choices
from cotenant.web.log_tail import LogTail
from cotenant.web.rows import to_json
from cotenant.web.shells import read_opening, read_typed
from cotenant.web.streams import positions

KEPT_RUN = (
    b'{"key": "ab", "case": "x", "processor_seconds": 1.5, "values": {"jct": 2.5}, "series": {"a": [1, 2.5]}}\n'
    b'{"key": "cd", "case": "y", "processor_seconds": 0, "values": {}, "series": {}}\n'
)
EVENT = recording.written(Began("n", "a", 1, 2, {("n", "core 0"): 1000}), 3.0).encode()
ENVIRONMENT = (
    b"COTENANT_ENDPOINT=127.0.0.1:1\nCOTENANT_TOKEN=abc\nCOTENANT_STATE_DIR=/none\nCOTENANT_TLS_CA=a\n",
    b"XDG_STATE_HOME=state\nXDG_CONFIG_HOME=config\nCOTENANT_TLS_CERT=b\nCOTENANT_TLS_KEY=c\n",
    b"COTENANT_STATE_DIR=~/x\nCOTENANT_ENDPOINT=queue=a:1,placement=[::1]:2|b:3\n",
    b"COTENANT_ETCD_CA=a\nCOTENANT_ETCD_CERT=b\nCOTENANT_ETCD_KEY=c\nHOME=/none\n",
)
STORES = (b"sqlite:/none/x", b"etcd://127.0.0.1:2379,[::1]:2380", b"memory:", b"etcds://a:1", b"sqlite:///none")
HTTP = (
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/other\r\nContent-Length: %d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}   \r\n0\r\n\r\n%d",
)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("displayed answers", _answers)
    yield Target("server errors", _errors)
    yield Target("forwarded callers", _callers, (Problem,))
    yield Target("page tokens", _pages, (Problem,))
    yield Target("environment", _environment, (AccessError,))
    yield Target("store URLs", _stores, (ValueError, StoreUnavailable))
    yield Target("provider answers", _provider)
    yield Target("authority", _authority, (BadCertificate,))
    yield Target("rotated certificates", _watched)
    yield Target(
        "cached runs",
        file_target(
            "kept.jsonl", lambda path: dict(read_kept(path.read_text(errors="replace").splitlines())), (KEPT_RUN,)
        ),
    )
    yield Target("history", file_target("history", _history, (EVENT * 2,)), (ValueError,))
    yield Target("commits", _commits, (ValueError, DecodeError))
    yield Target("gateway requests", _gateway, (HttpError,), in_loop=True)
    yield Target("dashboard requests", _dashboard, (InvalidArgument,), in_loop=True)


# What clients hear -------------------------------------------------------------------------------------------------


def _shown(answer: Message) -> None:
    """Format an answer as its command does, as a table or a card and as JSON."""
    shown: list[object] = []
    for field, value in answer.ListFields():
        many = value if field.is_repeated else [value]
        for one in many if field.message_type and not field.message_type.GetOptions().map_entry else ():
            match one.DESCRIPTOR.name:
                case "Job":
                    shown += [views.job_view(one, 5.0), show._card(one, 5.0)]
                    list_jobs.cells(list_jobs._view(one, 5.0))
                case "Node":
                    nodes.row(view := views.node_view(one, 5.0), views.amounts_shown([view]))
                    shown.append(view)
                case "Tenant":
                    tenants._row(view := tenants.tenant_view(one))
                    shown.append(view)
                case "Incident":
                    incidents._row(view := incidents.incident_view(one, 5.0))
                    shown.append(view)
                case "Estimate":
                    estimate_view_module.estimate_card(view := estimate_view_module.estimate_view(one))
                    shown.append(view)
                case "FailureCount":
                    shown.append(failures.view(one))
                case "Policy":
                    shown.append(policies._view(one))
    if answer.DESCRIPTOR.name == "ExplainJobResponse":
        shown.append(explain.explanation_view(answer, 5.0))  # type: ignore[arg-type]  # checked by its name
    if isinstance(answer, GetProcessResponse):
        processes = [replicas._view(one) | replicas._process(answer, 5.0, 6.0) for one in answer.replicas]
        members = replicas._merged([(teller, one) for teller in ("a:1", "b:1") for one in answer.store_members])
        shown += [*map(replicas._row, processes), *processes, *members]
    with redirect_stdout(StringIO()):
        views.print_json([one for one in shown if isinstance(one, dict)])


def _answers(directory: Path) -> Prepared:
    """Answers of any method, as from a newer or a broken server."""
    kinds = [GetMessageClass(method.output_type) for method in methods()]

    def run(data: bytes) -> None:
        rng = Random(data)
        answer = Drawer(rng, {}).fill(rng.choice(kinds)(), share=rng.choice((0.3, 0.6, 1.0)))
        _shown(answer)

    return Prepared(run, (b"0", b"1", b"abc"))


class _Failed(grpc.RpcError):  # type: ignore[misc]  # gRPC has no types
    """A failed call with these trailers."""

    def __init__(self, trailers: Any, code: grpc.StatusCode, details: str) -> None:
        self._told = trailers, code, details

    def trailing_metadata(self) -> Any:
        return self._told[0]

    def code(self) -> grpc.StatusCode:
        return self._told[1]

    def details(self) -> str:
        return self._told[2]


def _errors(directory: Path) -> Prepared:
    good = errors.to_status(errors.invalid([Violation("spec.name", "is invalid")])).SerializeToString()
    known = errors.to_status(errors.unavailable("away")).SerializeToString()

    def run(data: bytes) -> None:
        for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE):
            variables = _Failed(((errors.DETAILS_KEY, data),), code, data[:80].decode(errors="replace"))
            read = errors.from_error(variables)
            errors.to_status(read).SerializeToString()
            if not read.message and not read.reason:
                raise AssertionError("an error without a message")

    return Prepared(run, (good, known))


def _callers(directory: Path) -> Prepared:
    service = Identity("service/queue", frozenset({Role.SERVICE}), None, None)
    _, good = on_behalf_header(Subject.parse("user/eve?tenants=lab").identity)

    def run(data: bytes) -> None:
        text = data.decode(errors="replace")
        bearer_token((("authorization", text), ("authorization", data)))
        for metadata in (((CALLER, text),), ((CALLER, text), (CALLER, text))):
            known = acting_identity(service, metadata)
            if known.via != service.name:
                raise AssertionError(f"{known} without a caller")
        with suppress(Problem):
            acting_identity(OPERATOR, ((CALLER, text),))

    return Prepared(run, (good.encode(),))


def _pages(directory: Path) -> Prepared:
    ids = [f"job-{number}" for number in range(9)]
    tokens = [page_of(ids, size, "", scope="x")[1].encode() for size in (1, 4)]

    def run(data: bytes) -> None:
        text = data.decode(errors="replace")
        for descending in (False, True):
            page, _ = page_of(ids, 3, text, descending=descending, scope="x")
            if list(page) != [one for one in (reversed(ids) if descending else ids) if one in page]:
                raise AssertionError(f"a page of {page}")

    return Prepared(run, tokens)


# Where things are --------------------------------------------------------------------------------------------------


def _environment(directory: Path) -> Prepared:
    before = dict(os.environ)
    (directory / "config/cotenant").mkdir(parents=True)
    (directory / "config/cotenant/config.toml").write_text("endpoint = '127.0.0.1:1'\n")

    def run(data: bytes) -> None:
        lines = [line.partition(b"=") for line in data.replace(b"\0", b"").split(b"\n")]
        variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in lines if name}
        os.environ.clear()
        try:
            os.environ.update(variables)
            with suppress(ValueError):
                tls_of(variables)
            access_of(Flags(state_dir=variables.get("COTENANT_STATE_DIR", "")))
        finally:
            os.environ.clear()
            os.environ.update(before)

    return Prepared(within(directory, run), ENVIRONMENT)


def _stores(directory: Path) -> Prepared:
    loop = asyncio.new_event_loop()

    async def opened(url: str) -> None:
        store = await open_raw(url)
        await store.close()

    def run(data: bytes) -> None:
        url = data.decode(errors="replace")
        if url.partition(":")[0].startswith("etcd") or ":/none" in url or url == "memory:":
            loop.run_until_complete(opened(url))

    return Prepared(run, STORES)


def _gateway(directory: Path) -> Prepared:
    """A verb, a path and a query in the first line, then the body, as far as the gateway reads it in its loop."""
    routes = Routes(shipped_protos.api())

    def run(data: bytes) -> None:
        line, _, body = data[:INLINE_BYTES_MAX].partition(b"\n")
        verb, _, target = line.decode("latin-1").partition(" ")
        path, _, query = target.partition("?")
        route, variables = routes.find(verb, path)
        request = read_request(route, variables, query.encode("latin-1"), body)
        assert route.request.FromString(request.SerializeToString()) == request

    seeds = (
        b'POST /v1/jobs\n{"spec": {"name": "a", "roles": [{"resources": {"cores": 1.5}}], "labels": {"a": "b"}}}',
        b"GET /v1/jobs?filter.phases=JOB_PHASE_RUNNING&filter.labels[a]=b&filter.createdSince=2026-01-31T12:00:00Z",
        b'PATCH /v1/jobs/17?updateMask=spec.priority\n{"spec": {"grace": "5s", "kind": "JOB_KIND_TRAINING"}}',
        b'POST /v1/folders:writeChunks\n{"tenant": "a", "chunks": [{"data": "AAAA"}]}',
        b"GET /v1/jobs/a%2Fb/logs?follow=true&tailBytes=100",
    )
    return Prepared(run, seeds, (b"%ff", b"%2F", b":cancel", b"null", b"NaN", b"1e999", b"\\ud800", b'"id":'))


def _dashboard(directory: Path) -> Prepared:
    """What pages send, and the output of jobs that they show."""

    def run(data: bytes) -> None:
        positions(data.decode(errors="replace"))
        tail = LogTail()
        for piece in data.split(b"|"):
            tail.feed(len(piece) % 2, piece)
        shown = to_json(tail.take())
        assert shown.isprintable(), shown
        spec = JobSpec()
        spec.roles.add()
        changed(spec, read_wanted(data))
        for read in (read_choices, read_typed, read_opening):
            with suppress(InvalidArgument):
                read(data)

    return Prepared(
        run,
        (
            b'{"data": "ls\\r", "rows": 24, "columns": 80, "rank": 1}',
            b'{"gpus": 2, "cores": 3, "priority": -1}',
            b'{"policies": [["queue", "las"], ["profile", "full"]]}',
            b"jobs=a1-7,meta=b2-9",
            b"\x1b[31mred\r\n|\xc2\x9b",
        ),
    )


# Providers and authorities -----------------------------------------------------------------------------------------


def _provider(directory: Path) -> Prepared:
    """An identity provider on loopback with arbitrary answers; keys fetched before remain."""
    answer = [b""]

    class Answers(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(answer[0])

    server = socketserver.TCPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    issuer = f"http://127.0.0.1:{server.server_address[1]}"
    found = json.dumps({"issuer": issuer, "jwks_uri": f"{issuer}/keys"}).encode()
    seeds = [
        head % len(body) + body + end for head in HTTP for body in (found, keys_document()) for end in (b"", b"\1")
    ]

    class Asked(Oidc):
        def _ask(self) -> None:
            """Do nothing instead of starting a thread: keys are fetched within the input's run."""

    by_url, discovers = (Asked(OidcRules(issuer, "cotenant", url)) for url in (f"{issuer}/keys", ""))

    def run(data: bytes) -> None:
        answer[0] = data
        oidc = (by_url, discovers)[sum(data) % 2]
        oidc._fetch()
        with suppress(Problem):
            oidc.check("e30.e30.x")

    return Prepared(run, seeds)


def _authority(directory: Path) -> Prepared:
    """Issue and renew certificates with an authority whose certificate or key is damaged."""
    authority = Authority(directory / "ca")
    authority.create("lab", 10)
    cert, key = authority.cert_path.read_bytes(), authority.cert_path.with_name("ca.key").read_bytes()

    good = {authority.cert_path: cert, authority.cert_path.with_name("ca.key"): key}
    eve = Subject.parse("user/eve?tenants=lab")

    def run(data: bytes) -> None:
        refusal: BadCertificate | None = None
        for damaged in good:
            damaged.write_bytes(data)
            for use in (lambda: authority.issue(eve), authority.issued, authority.renew):
                try:
                    use()
                except BadCertificate as error:
                    refusal = error
            for path, content in good.items():
                path.write_bytes(content)
        if refusal:
            raise refusal

    return Prepared(run, (cert, key))


def _watched(directory: Path) -> Prepared:
    """TLS files that are exchanged while a server runs: invalid ones are ignored, and the previous ones stay."""
    authority = Authority(directory / "ca")
    authority.create("lab", 10)
    issued = authority.issue(Subject.parse("service/queue"), ["127.0.0.1"])
    good = {path: path.read_bytes() for path in (authority.cert_path, issued.path, issued.key_path)}
    clock = iter(range(0, 1 << 60, 1000)).__next__
    watched = WatchedTlsFiles(TlsFiles(authority.cert_path, issued.path, issued.key_path), clock=lambda: float(clock()))
    before = watched.material

    def run(data: bytes) -> None:
        path = list(good)[len(data) % 3]
        path.write_bytes(data)
        watched.look()
        path.write_bytes(good[path])
        os.utime(path, ns=(clock(), clock()))
        watched.look()
        if watched.material != before:
            raise AssertionError("valid files are not loaded again")

    return Prepared(run, tuple(good.values()))


# Histories ---------------------------------------------------------------------------------------------------------


def _history(path: Path) -> None:
    recording.read(path.read_text(errors="replace").splitlines())


def _commits(directory: Path) -> Prepared:
    from tests.verification.fuzz.records import good

    kinds = {
        "job": "queue/jobs/x",
        "node": "placement/nodes/x",
        "attempt": "placement/attempts/x",
        "leader": "queue/leader",
    }
    goods = {kinds[name]: good(name) for name in kinds}

    def run(data: bytes) -> None:
        """Decode it as the value of each key: bytes that are not a record of one kind may be one of another."""
        refused: list[Exception] = []
        for key in goods:
            try:
                commit_of(Changes(7, (Change(key, data, 7),)), 1.0, began_unix_seconds=5.0)
            except (ValueError, DecodeError) as error:
                refused.append(error)
        if len(refused) == len(goods):
            raise refused[0]

    def pack(data: bytes) -> bytes:
        """Make two of three inputs records with changed fields."""
        if zlib.crc32(data) % 3 == 0:
            return data
        rng = Random(data)
        name = rng.choice(list(kinds))
        record = getattr(records_pb2, f"Stored{name.capitalize()}").FromString(good(name))
        return bytes(Drawer(rng, {"id": ["x"]}).change(record).SerializeToString())

    return Prepared(run, tuple(goods.values()), pack=pack)
