"""A small certificate authority for a lab: one directory with its key, and certificates that name their subjects.

A certificate names its subject in a URI among its alternative names, as SPIFFE does: `cotenant://agent/gpu1`,
`cotenant://service/queue`, `cotenant://user/eve?tenants=a,b`. Servers cannot use certificates of agents and people. The
first certificate in `ca.pem` signs; the others in it are trusted until they are removed.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cotenant.security.subjects import Subject
from cotenant.security.validity import CA_DAYS, LEAF_DAYS, Validity

CA_CERT, CA_KEY = "ca.pem", "ca.key"
CA_NAME = "Cotenant lab"
BACKDATED = timedelta(minutes=5)  # clocks of a cluster differ slightly
COMMON_NAME_LENGTH_MAX = 64
PARSE_ERRORS = (
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)  # not subclasses of ValueError


class BadCertificate(Exception):
    """A certificate cannot be issued, or the authority cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate in the authority's directory."""

    path: Path
    subject: str
    names: tuple[str, ...]
    begins: datetime
    ends: datetime
    issuer: str

    @property
    def validity(self) -> Validity:
        """The time in which it is valid."""
        return Validity(self.begins, self.ends)

    @property
    def key_path(self) -> Path:
        """The path of its key."""
        return self.path.with_suffix(".key")


class Authority:
    """The directory of a certificate authority."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def cert_path(self) -> Path:
        """The file of trusted CA certificates."""
        return self.directory / CA_CERT

    def exists(self) -> bool:
        """Return whether the directory holds an authority."""
        return (self.directory / CA_KEY).exists()

    def create(self, name: str = CA_NAME, days: int = CA_DAYS) -> None:
        """Create the directory and the authority.

        Raises:
            BadCertificate: there already is an authority, or it cannot be written.
        """
        if self.exists():
            raise BadCertificate(f"{self.directory} already holds an authority; `certs rotate --ca` renews it")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadCertificate(f"cannot create {self.directory}: {error.strerror}") from None
        key, certificate = _new_authority(name, days)
        self._write(CA_KEY, _key_pem(key), 0o600)
        self._write(CA_CERT, _pem(certificate), 0o644)

    def renew(self, days: int = CA_DAYS) -> None:
        """Create a new authority that signs from now on; certificates of the previous one are still trusted."""
        before = self._authorities()
        names = before[0].subject.get_attributes_for_oid(NameOID.COMMON_NAME)  # a foreign authority may have none
        name = str(names[0].value)[:COMMON_NAME_LENGTH_MAX] if names else ""
        key, certificate = _new_authority(name or CA_NAME, days)
        self._write(CA_CERT, b"".join(map(_pem, (certificate, *before))), 0o644)  # first, so that everybody trusts it
        self._write(CA_KEY, _key_pem(key), 0o600)

    def forget_old(self) -> int:
        """Trust only the authority that signs; return how many others were trusted."""
        authorities = self._authorities()
        self._write(CA_CERT, _pem(authorities[0]), 0o644)
        return len(authorities) - 1

    def issue(self, subject: Subject, names: Sequence[str] = (), days: int = LEAF_DAYS) -> Issued:
        """Issue a certificate with its own key. `names` are the DNS names and addresses by which a server is called.

        Raises:
            BadCertificate: there is no authority, or it has expired, or a name is invalid.
        """
        if days < 1:
            raise BadCertificate(f"a certificate must be valid for at least 1 day, not {days}")
        signer, signer_key = self._authorities()[0], self._signing_key(self._authorities()[0])
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        ends = min(now + timedelta(days=days), signer.not_valid_after_utc)
        if ends <= now:
            raise BadCertificate(f"the authority expired on {ends:%Y-%m-%d}; `cotenant certs rotate --ca` renews it")
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if subject.serves else [])]
        alternatives = [x509.UniformResourceIdentifier(subject.uri), *map(_general_name, names)]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(str(subject)[:COMMON_NAME_LENGTH_MAX]))
            .issuer_name(signer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False)
            .sign(signer_key, hashes.SHA256())
        )
        stem = subject.file_stem
        self._write(f"{stem}.key", _key_pem(key), 0o600)
        self._write(f"{stem}.pem", _pem(certificate), 0o644)
        return read(self.directory / f"{stem}.pem")

    def issued(self) -> list[Issued]:
        """Return all certificates in the directory, by name; the authority's own first."""
        try:
            paths = sorted(self.directory.glob("*.pem"), key=lambda path: (path.name != CA_CERT, path.name))
        except OSError:
            return []
        return [read(path) for path in paths]

    def _authorities(self) -> list[x509.Certificate]:
        try:
            found = x509.load_pem_x509_certificates(self.cert_path.read_bytes())
            _ = [(one.subject, one.not_valid_after_utc) for one in found]  # parse these fields now
            return found
        except OSError:
            raise BadCertificate(
                f"there is no authority in {self.directory}; `cotenant certs init` creates one"
            ) from None
        except (ValueError, *PARSE_ERRORS):
            raise BadCertificate(f"{self.cert_path} has no valid PEM certificate") from None

    def _signing_key(self, signer: x509.Certificate) -> ec.EllipticCurvePrivateKey:
        path = self.directory / CA_KEY
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise BadCertificate(f"cannot read the authority's key {path}: {error.strerror}") from None
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise BadCertificate(f"{path} has no valid PEM private key") from None
        try:
            signers = signer.public_key()
        except (ValueError, UnsupportedAlgorithm):  # damaged, although it could be parsed
            raise BadCertificate(f"invalid public key in the first certificate of {self.cert_path}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != signers:
            raise BadCertificate(f"{path} is not the key of the first certificate in {self.cert_path}")
        return key

    def _write(self, name: str, content: bytes, mode: int) -> None:
        """Write a file atomically, readable only by its owner until it is complete."""
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=self.directory)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(temporary).replace(self.directory / name)
        except OSError as error:
            raise BadCertificate(f"cannot write {self.directory / name}: {error.strerror}") from None


def read(path: Path) -> Issued:
    """Return a file's first certificate.

    Raises:
        BadCertificate: it cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificates(path.read_bytes())[0]
        uris, names = _alternatives(certificate)
        return Issued(
            path,
            next((uri for uri in uris if uri.startswith("cotenant://")), ""),
            tuple(names),
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
            certificate.issuer.rfc4514_string(),
        )
    except OSError as error:
        raise BadCertificate(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, *PARSE_ERRORS):  # some fields are parsed on access
        raise BadCertificate(f"{path} has no valid PEM certificate") from None


def _alternatives(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], []
    addresses = [str(one) for one in found.get_values_for_type(x509.IPAddress)]
    return found.get_values_for_type(x509.UniformResourceIdentifier), [
        *found.get_values_for_type(x509.DNSName),
        *addresses,
    ]


def _new_authority(name: str, days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _key_usage() -> x509.KeyUsage:
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    rest = dict.fromkeys((*names.split(), "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **rest)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        if not text or any(letter.isspace() or letter in "/:@" for letter in text):
            raise ValueError
        return x509.DNSName(text)
    except ValueError:
        raise BadCertificate(f"{text!r} is neither a DNS name nor an address") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def names_of(issued: Iterable[str]) -> list[str]:
    """Return the names without duplicates."""
    return list(dict.fromkeys(issued))
