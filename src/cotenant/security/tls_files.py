"""TLS files that may change while a process runs: reading, validating and watching them.

This module does not load gRPC, so that a command can check files at no cost. Files are checked at most once a second,
and reloaded when all of them match each other: they need not be replaced atomically. Files that do not match are logged
once.

A plain client has no `cryptography` and checks its files in `cotenant.security.tls_rehearsal`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cotenant import telemetry
from cotenant.security.validity import Validity

log = telemetry.logger()

LOOK_SECONDS = 1.0
REPLACED_WITHIN_SECONDS, PAIR_TRIES, PAIR_POLL_SECONDS = 5.0, 50, 0.02
CAN_READ_CERTIFICATES = find_spec("cryptography") is not None
REJECTION_REMEDY = "replace the TLS files; until then the certificate before stays in use"
BEGIN = b"-----BEGIN CERTIFICATE-----"


class BadTls(Exception):
    """The files cannot be used; `reason` is a stable code, the message says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of the certificates, in PEM.

    `ca` are the authorities that this end trusts, None means the system's; `cert` and `key` are what it shows, which a
    client with a token may omit. A server with `client_certificates` requires a certificate of these authorities from
    every client. `of_others` says that the other end may trust other authorities than this one.
    """

    ca: Path | None
    cert: Path | None = None
    key: Path | None = None
    client_certificates: bool = True
    of_others: bool = False

    def paths(self) -> tuple[Path, ...]:
        """Return all files."""
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)


@dataclass(frozen=True, slots=True)
class Material:
    """The contents of the files."""

    ca: bytes | None
    cert: bytes | None = None
    key: bytes | None = None
    validity: Validity | None = None  # of the certificate
    subject: str = ""  # of the certificate, such as "CN=agent/gpu1"


def load(files: TlsFiles, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> Material:
    """Read the files and validate them.

    Raises:
        BadTls: TLS_FILE_UNREADABLE, CERTIFICATE_UNREADABLE, KEY_UNREADABLE, KEY_OF_ANOTHER, CERTIFICATE_EXPIRED,
            CERTIFICATE_NOT_YET_VALID or CERTIFICATE_OF_ANOTHER_CA.
    """
    if bool(files.cert) != bool(files.key):
        raise BadTls("TLS_FILE_MISSING", "a certificate needs its key: pass both, or neither")
    ca = _read(files.ca) if files.ca else None
    if not CAN_READ_CERTIFICATES:
        return Material(ca, *_rehearsed(files, now()))
    authorities = _certificates(files.ca, ca) if files.ca and ca is not None else []
    if files.cert is None or files.key is None:
        return Material(ca)
    cert, key = _read(files.cert), _read(files.key)
    chain = _certificates(files.cert, cert)
    _check_key(files.key, key, chain[0])
    validity = Validity(chain[0].not_valid_before_utc, chain[0].not_valid_after_utc)
    _check_times(files.cert, validity, now())
    if not files.of_others:
        _check_issuer(files, chain, authorities)
    return Material(ca, cert, key, validity, _subject(files.cert, chain[0]))


def load_pair(files: TlsFiles, sleep: Callable[[float], None] = time.sleep) -> Material:
    """Read the files and validate them; wait up to a second for the other half of a pair that is being replaced.

    A certificate and its key are two files: a process that starts in between would find the key of another certificate.
    Files that nobody has replaced in the last seconds are not waited for. Raises what `load` raises.
    """
    for _ in range(PAIR_TRIES):
        try:
            return load(files)
        except BadTls as error:
            if error.reason != "KEY_OF_ANOTHER" or not _just_replaced(files):
                raise
        sleep(PAIR_POLL_SECONDS)
    return load(files)


def _just_replaced(files: TlsFiles) -> bool:
    pair = [path for path in (files.cert, files.key) if path is not None]
    newest = max((path.stat().st_mtime for path in pair if path.exists()), default=0.0)
    return abs(time.time() - newest) < REPLACED_WITHIN_SECONDS


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadTls("TLS_FILE_UNREADABLE", f"cannot read {path}: {error.strerror}") from None


def _certificates(path: Path, pem: bytes) -> list[Any]:
    from cryptography import x509  # slow to import, and only needed with TLS

    try:
        found = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise BadTls("CERTIFICATE_UNREADABLE", f"{path} has no valid PEM certificate") from None
    if len(found) < (begun := pem.count(BEGIN)):
        raise BadTls("CERTIFICATE_UNREADABLE", f"{path} has {begun} certificates, only {len(found)} complete")
    return found


def _check_key(path: Path, pem: bytes, certificate: Any) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise BadTls("KEY_UNREADABLE", f"{path} has no valid, unencrypted PEM private key") from None
    try:
        belongs = key.public_key() == certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):  # damaged, although it could be parsed
        raise BadTls("CERTIFICATE_UNREADABLE", f"the certificate for {path} has an invalid public key") from None
    if not belongs:
        raise BadTls("KEY_OF_ANOTHER", f"{path} is the key of another certificate")


def _rehearsed(files: TlsFiles, now: datetime) -> tuple[bytes, bytes, Validity | None] | tuple[()]:
    """Check a client's files without `cryptography`; return its certificate, if any, with its key and validity."""
    from cotenant.security import tls_rehearsal

    if files.cert is None or files.key is None:
        if files.ca and not tls_rehearsal.has_certificates(files.ca):
            raise BadTls("CERTIFICATE_UNREADABLE", f"{files.ca} has no valid PEM certificate")
        return ()
    cert, key = _read(files.cert), _read(files.key)
    trusted = files.cert if files.of_others or files.ca is None else files.ca
    for path in (trusted, files.cert):
        if not tls_rehearsal.has_certificates(path):
            raise BadTls("CERTIFICATE_UNREADABLE", f"{path} has no valid PEM certificate")
    try:
        validity = tls_rehearsal.rehearse(files.cert, files.key, trusted)
    except tls_rehearsal.BadKey as error:
        if error.is_of_another:
            raise BadTls("KEY_OF_ANOTHER", f"{files.key} is the key of another certificate") from None
        raise BadTls("KEY_UNREADABLE", f"{files.key} has no valid, unencrypted PEM private key") from None
    except tls_rehearsal.Untrusted:
        raise _issued_by_others(files) from None
    if validity:
        _check_times(files.cert, validity, now)
    return cert, key, validity


def _subject(path: Path, certificate: Any) -> str:
    try:
        return str(certificate.subject.rfc4514_string())
    except ValueError:
        raise BadTls("CERTIFICATE_UNREADABLE", f"{path} has an invalid subject") from None


def _check_times(path: Path, validity: Validity, now: datetime) -> None:
    begins, ends = validity.begins, validity.ends
    if now > ends:
        raise BadTls("CERTIFICATE_EXPIRED", f"{path} was valid until {ends:%Y-%m-%d %H:%M} UTC; issue a new one")
    if now < begins:
        skew = (begins - now).total_seconds()
        raise BadTls(
            "CERTIFICATE_NOT_YET_VALID",
            f"{path} is valid from {begins:%Y-%m-%d %H:%M:%S} UTC, which by this machine's clock is in {skew:.0f} s; "
            "check the clock",
        )


def _check_issuer(files: TlsFiles, chain: list[Any], authorities: list[Any]) -> None:
    """Check that a certificate, or one of its chain, was issued by a trusted authority."""
    for certificate in chain:
        for authority in authorities:
            if certificate == authority or _issued(certificate, authority):
                return
    raise _issued_by_others(files)


def _issued_by_others(files: TlsFiles) -> BadTls:
    return BadTls("CERTIFICATE_OF_ANOTHER_CA", f"{files.cert} was issued by none of the authorities in {files.ca}")


def _issued(certificate: Any, authority: Any) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


class WatchedTlsFiles:
    """The current files. Files that do not match each other are rejected until they do."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the files; raises what `load` raises."""
        self.files, self._clock = files, clock
        self._lock = threading.Lock()  # gRPC calls from its own threads
        self._stamp = self._stamped()
        self.rejection = ""  # why the present files are not used
        self.material = load_pair(files)
        self.generation = 0
        self._looked = clock()

    def look(self) -> int:
        """Check the files, unless that was done just now; return how often they have changed.

        If they are rejected, `rejection` is the reason until they are replaced.
        """
        with self._lock:
            if self._clock() - self._looked < LOOK_SECONDS:
                return self.generation
            self._looked = self._clock()
            stamp = self._stamped()
            if stamp == self._stamp:
                self.rejection = ""
                return self.generation
            try:
                material = load(self.files)
            except BadTls as error:
                if self.rejection != str(error):
                    log.warning("tls_files_rejected", why=str(error))
                self.rejection = str(error)
                return self.generation
            self._stamp, self.rejection = stamp, ""
            if material != self.material:
                self.material = material
                self.generation += 1
                log.info("tls_files_reloaded", cert=str(self.files.cert))
            return self.generation

    def _stamped(self) -> tuple[object, ...]:
        stamps: list[object] = []
        for path in self.files.paths():
            try:
                found = path.stat()
                stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
            except OSError:
                stamps.append(None)
        return tuple(stamps)
