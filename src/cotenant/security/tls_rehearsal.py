"""Checks a client's certificate with the standard library: shows it to a server in memory, which verifies it.

A server does not tell a client why it refuses a certificate. So a client checks its own files first, and a plain
installation has no `cryptography` to do so. In the rehearsal OpenSSL decides as it would in the server, except that it
ignores the clock: so the dates can be read from the certificate, and an expired one gets an error of its own.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cotenant.security.validity import Validity

IGNORE_CLOCK = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME: Python passes it on but has no name for it
FLIGHTS_MAX = 6  # messages back and forth; TLS 1.3 needs three


class BadKey(Exception):
    """A key that cannot be read, or that belongs to another certificate."""

    def __init__(self, *, is_of_another: bool) -> None:
        super().__init__()
        self.is_of_another = is_of_another


class Untrusted(Exception):
    """A certificate that no trusted authority has issued."""


def has_certificates(path: Path) -> bool:
    """Return whether a file holds certificates, all of them complete."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError:  # OpenSSL's errors too
        return False
    return True


def rehearse(cert: Path, key: Path, trusted: Path) -> Validity | None:
    """Return the validity of a certificate that the authorities in `trusted` have issued, or that is among them.

    None if the rehearsal fails for another reason: then the real connection has to show what is wrong.

    Raises:
        BadKey: the key is not the certificate's, or cannot be read without a password.
        Untrusted: it was issued by others.
    """
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE  # only the other direction is of interest
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= IGNORE_CLOCK | ssl.VERIFY_X509_PARTIAL_CHAIN
    server.load_verify_locations(trusted)
    for context in (client, server):
        _show(context, cert, key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(FLIGHTS_MAX):
            for end in ends:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLCertVerificationError:
        raise Untrusted from None
    except ssl.SSLError:
        return None
    seen = ends[1].getpeercert()
    if not seen:
        return None
    begins, ends_at = (ssl.cert_time_to_seconds(str(seen[name])) for name in ("notBefore", "notAfter"))
    return Validity(datetime.fromtimestamp(begins, UTC), datetime.fromtimestamp(ends_at, UTC))


def _show(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load what an end shows. Weak keys are no concern of a rehearsal."""
    context.set_ciphers("ALL:@SECLEVEL=0")
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise BadKey(is_of_another=getattr(error, "reason", "") == "KEY_VALUES_MISMATCH") from None
