"""Mutual TLS: admitted and rejected callers, and certificates that change during calls."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID as Use
from cryptography.x509.oid import NameOID
from structlog.testing import capture_logs
from tests.unit.rpc.conftest import Mesh, problem_of

from cotenant.agent.v1 import agent_service_pb2_grpc as agents_grpc
from cotenant.rpc.channel import Channel, connect
from cotenant.rpc.server import Server
from cotenant.security import certificates, grpc_tls, tls_files
from cotenant.security.certificates import Authority, BadCertificate, Issued
from cotenant.security.credentials import Credentials
from cotenant.security.grpc_tls import BadTls, TlsFiles, WatchedTlsFiles
from cotenant.security.identity import Identity, caller
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc

HERE = ["127.0.0.1", "localhost"]
EVE, QUEUE = Subject.parse("user/eve?tenants=lab"), Subject.parse("service/queue")


@pytest.fixture
def lab(tmp_path: Path) -> Authority:
    authority = Authority(tmp_path / "lab")
    authority.create()
    return authority


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    authority = Authority(tmp_path / "stranger")
    authority.create("Somebody else")
    return authority


@contextmanager
def clock_is_off(by: timedelta, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Issue certificates as on a machine with another clock."""

    class Off(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + by

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", Off)
        yield


def files(authority: Authority, issued: Issued, *, ca: Path | None = None) -> TlsFiles:
    return TlsFiles(ca or authority.cert_path, issued.path, issued.key_path)


async def serve(mesh: Mesh, served: TlsFiles, **bearers: str) -> WatchedTlsFiles:
    watched = WatchedTlsFiles(served)
    await mesh.serve(
        security=Security(authenticator=Credentials("mesh-token", bearers=bearers), tls=watched), token=None
    )
    return watched


def opened(mesh: Mesh, shown: TlsFiles | None, token: str = "", host: str = "127.0.0.1") -> Channel:
    made = connect(f"{host}:{mesh.port}", token, tls=shown)
    mesh._stack.push_async_callback(made.close)
    return made


def get(over: Channel) -> Any:
    return jobs_grpc.JobServiceStub(over).GetJob(jobs_pb.GetJobRequest(), timeout=60)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_files, "LOOK_SECONDS", 0.0)


async def test_a_certificate_identifies_its_subject(mesh: Mesh, lab: Authority) -> None:
    await serve(mesh, files(lab, lab.issue(QUEUE, HERE)))
    seen: list[Identity] = []

    async def look(request: Any, context: Any) -> None:
        seen.append(caller())

    mesh.jobs.answer = look
    await get(opened(mesh, files(lab, lab.issue(EVE))))
    assert seen == [EVE.identity]
    await get(opened(mesh, files(lab, lab.issue(EVE)), token="mesh-token"))  # a token takes precedence
    assert seen[1].name == "operator"
    wrong = await problem_of(get(opened(mesh, files(lab, lab.issue(EVE)), token="guessed")))
    assert wrong.reason == "TOKEN_WRONG"


async def test_strangers_do_not_get_in(mesh: Mesh, lab: Authority, stranger: Authority) -> None:
    await serve(mesh, files(lab, lab.issue(QUEUE, HERE)))
    theirs = stranger.issue(EVE)
    credentials = grpc.ssl_channel_credentials(
        lab.cert_path.read_bytes(), theirs.key_path.read_bytes(), theirs.path.read_bytes()
    )
    for shown in (credentials, grpc.ssl_channel_credentials(lab.cert_path.read_bytes()), None):
        address = f"127.0.0.1:{mesh.port}"
        over = grpc.aio.secure_channel(address, shown) if shown else grpc.aio.insecure_channel(address)
        async with over:
            assert (await problem_of(get(over))).code is grpc.StatusCode.UNAVAILABLE
    assert mesh.jobs.asked == []


async def test_each_tls_error_of_the_server_has_its_own_reason(
    mesh: Mesh, lab: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = lab.issue(QUEUE, HERE)
    served = await serve(mesh, files(lab, queue))
    mine = files(lab, lab.issue(EVE))

    async def word(shown: TlsFiles = mine, host: str = "127.0.0.1") -> str:
        return (await problem_of(get(opened(mesh, shown, host=host)))).reason

    assert await word(TlsFiles(stranger.cert_path)) == "CERTIFICATE_OF_ANOTHER_CA"
    with monkeypatch.context() as patch:  # a server rejects such files itself: its clock must have advanced
        patch.setattr(tls_files, "_check_times", lambda *given: None)
        with clock_is_off(-timedelta(days=3), monkeypatch):
            lab.issue(QUEUE, HERE, days=1)
        assert await word() == "CERTIFICATE_EXPIRED"
        with clock_is_off(timedelta(days=1), monkeypatch):
            lab.issue(QUEUE, HERE)
        assert await word() == "CERTIFICATE_NOT_YET_VALID"
    lab.issue(QUEUE, ["queue.example"])
    assert await word() == "CERTIFICATE_OF_ANOTHER_NAME"
    async with connect(f"127.0.0.1:{mesh.port}", tls=mine, called="queue.example") as one_of_several:
        await get(one_of_several)
    lab.issue(EVE)
    assert served.look() >= 3
    lab.issue(QUEUE, HERE)
    await get(opened(mesh, mine))


async def test_tls_to_a_server_without_it_has_its_own_reason(mesh: Mesh, lab: Authority) -> None:
    await mesh.serve()
    assert (await problem_of(get(opened(mesh, files(lab, lab.issue(EVE)))))).reason == "NO_TLS_THERE"


async def test_a_certificate_without_a_subject_needs_a_mapping_in_the_settings(mesh: Mesh, lab: Authority) -> None:
    """Foreign authorities know no roles: the settings map a name in the certificate to a subject."""
    served = files(lab, lab.issue(QUEUE, HERE))
    for name in ("gpu1.corp", "gpu2.corp"):
        foreign(lab, name)
    await serve(mesh, served, **{"gpu1.corp": "service/contention"})
    one, other = (TlsFiles(lab.cert_path, *_pair(lab, name)) for name in ("gpu1.corp", "gpu2.corp"))
    stub = agents_grpc.AgentServiceStub(opened(mesh, one))
    refused = await problem_of(stub.UploadOutput(iter([])))
    assert (refused.reason, "service/contention" in refused.message) == ("ROLE_MAY_NOT", True)
    assert (await problem_of(get(opened(mesh, other)))).reason == "CERTIFICATE_OF_NOBODY"
    with pytest.raises(ValueError, match="is not ROLE/NAME"):
        Credentials(bearers={"gpu1.corp": "gpu1"})


def _pair(authority: Authority, name: str) -> tuple[Path, Path]:
    return authority.directory / f"{name}.pem", authority.directory / f"{name}.key"


def foreign(authority: Authority, name: str) -> None:
    """Issue a certificate as other authorities do: with a common name and a DNS name."""
    signer = authority._authorities()[0]
    key, own_key = ec.generate_private_key(ec.SECP256R1()), authority._signing_key(signer)
    made = (
        x509.CertificateBuilder()
        .subject_name(certificates._name(name))
        .issuer_name(signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(own_key, hashes.SHA256())
    )
    pem, key_path = _pair(authority, name)
    pem.write_bytes(certificates._pem(made))
    key_path.write_bytes(certificates._key_pem(key))


async def test_certificates_are_renewed_under_running_calls(mesh: Mesh, lab: Authority) -> None:
    queue, eve = files(lab, lab.issue(QUEUE, HERE)), files(lab, lab.issue(EVE))
    await serve(mesh, queue)
    over = opened(mesh, eve)
    stub = jobs_grpc.JobServiceStub(over)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Any) -> None:
        begun.set()
        await go_on.wait()

    mesh.jobs.answer = wait
    under_way = asyncio.ensure_future(_call(stub))
    await begun.wait()
    first = over._inner
    lab.renew()  # the authority too: its new certificate is added to the old one
    for subject, names in ((QUEUE, HERE), (EVE, [])):
        lab.issue(subject, names)
    go_on.set()
    await stub.GetJob(jobs_pb.GetJobRequest(), timeout=60)
    assert over._inner is not first
    await under_way
    assert lab.forget_old() == 1
    await stub.GetJob(jobs_pb.GetJobRequest(), timeout=60)
    await get(opened(mesh, eve))


async def _call(stub: Any) -> Any:
    return await stub.GetJob(jobs_pb.GetJobRequest(), timeout=60)


def test_partly_renewed_files_are_rejected_and_logged_once(lab: Authority, stranger: Authority) -> None:
    watched = WatchedTlsFiles(files(lab, lab.issue(EVE)))
    before = watched.material
    other = stranger.issue(EVE)
    assert watched.files.cert
    assert watched.files.key
    watched.files.key.write_bytes(other.key_path.read_bytes())
    with capture_logs() as told:
        assert [(watched.look(), watched.material) for _ in range(3)] == [(0, before)] * 3
    assert [one["event"] for one in told] == ["tls_files_rejected"]
    assert watched.rejection.startswith("KEY_OF_ANOTHER: ")
    watched.files.key.unlink()
    assert (watched.look(), watched.material) == (0, before)
    lab.issue(EVE)
    assert watched.look() == 1
    assert watched.material != before
    assert not watched.rejection


def half_renewed(lab: Authority) -> tuple[TlsFiles, Callable[[], None]]:
    """Return a new certificate beside the old key, and what puts the new key in place."""
    found = files(lab, lab.issue(EVE))
    assert found.key
    key, old = found.key, found.key.read_bytes()
    lab.issue(EVE)
    new = key.read_bytes()
    key.write_bytes(old)

    def finish() -> None:
        key.write_bytes(new)

    return found, finish


def test_a_process_that_starts_during_a_renewal_waits_for_the_key(lab: Authority) -> None:
    found, finish = half_renewed(lab)
    assert tls_files.load_pair(found, sleep=lambda seconds: finish()) == tls_files.load(found)


def test_a_key_that_never_comes_is_an_error_and_at_once_if_nobody_replaces_the_files(lab: Authority) -> None:
    found, _ = half_renewed(lab)
    waits: list[float] = []
    with pytest.raises(BadTls, match="KEY_OF_ANOTHER"):
        tls_files.load_pair(found, sleep=waits.append)
    assert sum(waits) == pytest.approx(1.0)
    for path in found.paths():
        os.utime(path, (0, 0))
    with pytest.raises(BadTls, match="KEY_OF_ANOTHER"):
        WatchedTlsFiles(found)


def test_a_server_reports_files_that_it_does_not_use(
    lab: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = files(lab, lab.issue(QUEUE, HERE))
    server = Server(security=Security(tls=WatchedTlsFiles(served)))
    assert server.problems() == []
    with clock_is_off(-timedelta(days=3), monkeypatch):
        lab.issue(QUEUE, HERE, days=1)
    (problem,) = server.problems()
    assert problem.reason.startswith("it does not use its new certificate: CERTIFICATE_EXPIRED: ")
    lab.issue(QUEUE, HERE)
    assert server.problems() == []


@pytest.mark.parametrize("plain", [False, True], ids=["with cryptography", "plain"])
@pytest.mark.parametrize(
    "kind",
    [
        *("expired", "early", "other CA", "same-named CA", "other key", "no key", "encrypted key", "garbage"),
        *("garbage CA", "garbage CA alone", "cut off", "away", "half"),
    ],
)
def test_own_files_are_validated_before_use(
    lab: Authority, stranger: Authority, kind: str, plain: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = {
        "expired": "CERTIFICATE_EXPIRED",
        "early": "CERTIFICATE_NOT_YET_VALID",
        "other CA": "CERTIFICATE_OF_ANOTHER_CA",
        "same-named CA": "CERTIFICATE_OF_ANOTHER_CA",
        "other key": "KEY_OF_ANOTHER",
        "no key": "KEY_UNREADABLE",
        "encrypted key": "KEY_UNREADABLE",
        "garbage": "CERTIFICATE_UNREADABLE",
        "garbage CA": "CERTIFICATE_UNREADABLE",
        "garbage CA alone": "CERTIFICATE_UNREADABLE",
        "cut off": "CERTIFICATE_UNREADABLE",
        "away": "TLS_FILE_UNREADABLE",
        "half": "TLS_FILE_MISSING",
    }
    by = {"expired": -timedelta(days=3), "early": timedelta(hours=2)}.get(kind, timedelta())
    with clock_is_off(by, monkeypatch):
        eve = lab.issue(EVE, days=1)
    given = files(lab, eve)
    monkeypatch.setattr(tls_files, "CAN_READ_CERTIFICATES", not plain)
    match kind:
        case "other CA":
            given = files(lab, stranger.issue(EVE))
        case "same-named CA":
            namesake = Authority(tmp_path / "namesake")
            namesake.create()
            given = files(lab, namesake.issue(EVE))
        case "encrypted key":
            key = serialization.load_pem_private_key(eve.key_path.read_bytes(), password=None)
            form, kept = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
            eve.key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, kept))
        case "garbage CA" | "garbage CA alone":
            lab.cert_path.write_bytes(b"\x00" * 100)
            given = given if kind == "garbage CA" else TlsFiles(lab.cert_path)
        case "other key":
            eve.key_path.write_bytes(stranger.issue(EVE).key_path.read_bytes())
        case "no key":
            eve.key_path.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
        case "garbage":
            eve.path.write_bytes(b"\x00" * 100)
        case "cut off":  # the second of two authorities, as if it were still being written
            lab.renew()
            given = files(lab, lab.issue(EVE))
            lab.cert_path.write_bytes(lab.cert_path.read_bytes()[:-30])
        case "away":
            eve.path.unlink()
        case "half":
            given = TlsFiles(lab.cert_path, eve.path)
    with pytest.raises(BadTls) as bad:
        grpc_tls.load(given)
    assert bad.value.reason == words[kind]
    assert str(lab.directory.parent) in str(bad.value) or kind == "half"


@pytest.mark.parametrize("others", [False, True])
def test_a_plain_client_knows_the_validity_of_its_certificate(
    lab: Authority, stranger: Authority, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    eve = lab.issue(EVE)
    given = files(lab, eve)
    if others:
        given = TlsFiles(stranger.cert_path, eve.path, eve.key_path, of_others=True)
    known = grpc_tls.load(given)
    monkeypatch.setattr(tls_files, "CAN_READ_CERTIFICATES", False)
    plain = grpc_tls.load(given)
    assert plain.validity == known.validity
    assert (plain.ca, plain.cert, plain.key) == (known.ca, known.cert, known.key)


# The authority ------------------------------------------------------------------------------------------------------


def test_keys_are_private_and_issued_certificates_are_listed(lab: Authority) -> None:
    gpu1 = lab.issue(Subject.parse("agent/gpu1"), ["gpu1.lab", "10.0.0.7"], days=30)
    assert gpu1.key_path.stat().st_mode & 0o777 == 0o600
    assert (lab.directory / "ca.key").stat().st_mode & 0o777 == 0o600
    assert lab.directory.stat().st_mode & 0o777 == 0o700
    assert (gpu1.subject, gpu1.names) == ("cotenant://agent/gpu1", ("gpu1.lab", "10.0.0.7"))
    assert timedelta(days=29) < gpu1.ends - datetime.now(UTC) <= timedelta(days=30)
    assert [one.path.name for one in lab.issued()] == ["ca.pem", "agent-gpu1.pem"]


def test_an_agents_certificate_cannot_be_used_by_a_server(lab: Authority) -> None:
    for subject, may_serve in (("agent/gpu1", False), ("user/eve?tenants=a", False), ("service/queue", True)):
        pem = lab.issue(Subject.parse(subject), HERE).path.read_bytes()
        uses = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (Use.SERVER_AUTH in uses) == may_serve


@pytest.mark.parametrize("name", ["", "a b", "https://x", "a/b", "ü" * 70])
def test_invalid_names_are_rejected(lab: Authority, name: str) -> None:
    with pytest.raises(BadCertificate, match="neither"):
        lab.issue(QUEUE, [name])


@pytest.mark.parametrize("use", [Authority.renew, lambda authority: authority.issue(EVE)])
def test_an_authority_whose_name_is_damaged_is_refused(lab: Authority, use: Callable[[Authority], Any]) -> None:
    der = x509.load_pem_x509_certificate(lab.cert_path.read_bytes()).public_bytes(serialization.Encoding.DER)
    damaged = ssl.DER_cert_to_PEM_cert(der.replace(b"Cotenant lab", b"Cotenant l\xff\xff"))  # can be parsed anyway
    lab.cert_path.write_text(damaged)
    with pytest.raises(BadCertificate, match="no valid PEM certificate"):
        use(lab)
    assert lab.cert_path.read_text() == damaged


@pytest.mark.filterwarnings("ignore:Attribute's length must be")
@pytest.mark.parametrize(
    ("kind", "name", "renewed"),
    [(NameOID.ORGANIZATION_NAME, "A lab", "Cotenant lab"), (NameOID.COMMON_NAME, "a" * 70, "a" * 64)],
)
def test_an_authority_of_another_kind_of_name_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: x509.ObjectIdentifier, name: str, renewed: str
) -> None:
    authority, attribute = Authority(tmp_path / "elsewhere"), x509.NameAttribute(kind, name, _validate=False)
    with monkeypatch.context() as names:
        names.setattr(certificates, "_name", lambda common: x509.Name([attribute]))
        authority.create()
    authority.renew()
    first = authority._authorities()[0]
    assert first.subject.rfc4514_string() == f"CN={renewed}"


def test_an_expired_authority_issues_nothing_until_it_is_renewed(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "old")
    authority.create(days=0)
    with pytest.raises(BadCertificate, match=r"the authority expired on 20.*certs rotate --ca"):
        authority.issue(EVE)
    authority.renew()
    assert authority.issue(EVE).ends > datetime.now(UTC)


def test_there_is_one_authority_at_a_time(lab: Authority, tmp_path: Path) -> None:
    with pytest.raises(BadCertificate, match="already holds an authority"):
        lab.create()
    with pytest.raises(BadCertificate, match="there is no authority"):
        Authority(tmp_path / "nowhere").issue(EVE)
    (lab.directory / "ca.key").write_bytes((lab.issue(EVE)).key_path.read_bytes())
    with pytest.raises(BadCertificate, match="not the key of"):
        lab.issue(EVE)


@pytest.mark.parametrize(
    "text",
    [
        *("", "eve", "user/", "root/eve", "user/eve", "user/operator?tenants=a", "user/anyone?tenants=*"),
        *("user/a b?tenants=a", "user/eve?tenants=A", "user/../x?tenants=a", "agent/", "agent/a b"),
        *("viewer/eve?tenants=", f"user/{'x' * 200}"),
    ],
)
def test_invalid_subjects_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Subject.parse(text)
