"""Why a TLS handshake failed, read from gRPC's details."""

from __future__ import annotations

FAILED_HANDSHAKES = (
    ("certificate has expired", "CERTIFICATE_EXPIRED", "the server's certificate has expired; it must be issued anew"),
    (
        "certificate is not yet valid",
        "CERTIFICATE_NOT_YET_VALID",
        "the server's certificate is not valid yet; is this machine's clock right, and the server's?",
    ),
    (
        "unable to get local issuer",
        "CERTIFICATE_OF_ANOTHER_CA",
        "the server's certificate was issued by an authority that is not among those of --tls-ca",
    ),
    ("self signed", "CERTIFICATE_OF_ANOTHER_CA", "the server's certificate was issued by nobody that --tls-ca names"),
    ("self-signed", "CERTIFICATE_OF_ANOTHER_CA", "the server's certificate was issued by nobody that --tls-ca names"),
    (
        "Hostname Verification Check failed",
        "CERTIFICATE_OF_ANOTHER_NAME",
        "the server's certificate is not for the name or address by which it was called",
    ),
    ("WRONG_VERSION_NUMBER", "NO_TLS_THERE", "the server speaks no TLS"),
)


def handshake_word(details: str) -> tuple[str, str] | None:
    """Read why a handshake failed; None where that is not what the details tell.

    >>> handshake_word("… CERTIFICATE_VERIFY_FAILED: certificate has expired: OK")[0]
    'CERTIFICATE_EXPIRED'
    """
    for part, reason, message in FAILED_HANDSHAKES:
        if part in details:
            return reason, message
    return None
