"""Explains why a TLS handshake failed, from gRPC's error details."""

from __future__ import annotations

FAILED_HANDSHAKES = (
    ("certificate has expired", "CERTIFICATE_EXPIRED", "the server's certificate has expired; it must be renewed"),
    (
        "certificate is not yet valid",
        "CERTIFICATE_NOT_YET_VALID",
        "the server's certificate is not valid yet; check this machine's clock and the server's",
    ),
    (
        "unable to get local issuer",
        "CERTIFICATE_OF_ANOTHER_CA",
        "the server's certificate was issued by an authority that is not in --tls-ca",
    ),
    ("self signed", "CERTIFICATE_OF_ANOTHER_CA", "the server's certificate was not issued by an authority in --tls-ca"),
    ("self-signed", "CERTIFICATE_OF_ANOTHER_CA", "the server's certificate was not issued by an authority in --tls-ca"),
    (
        "Hostname Verification Check failed",
        "CERTIFICATE_OF_ANOTHER_NAME",
        "the server's certificate is not valid for the name or address that was called",
    ),
    ("WRONG_VERSION_NUMBER", "NO_TLS_THERE", "the server does not use TLS"),
)


def handshake_failure(details: str) -> tuple[str, str] | None:
    """Return why a handshake failed; None if the details are about something else.

    >>> handshake_failure("… CERTIFICATE_VERIFY_FAILED: certificate has expired: OK")[0]
    'CERTIFICATE_EXPIRED'
    """
    for part, reason, message in FAILED_HANDSHAKES:
        if part in details:
            return reason, message
    return None
