"""TLS for both ends of a call, from files that may change while a process runs.

A server asks for its certificate at each handshake, so that one that was renewed is used from the next connection on.
A channel of gRPC's cannot: `channel.Channel` opens a new one when its files have changed. How files are read, and when
they are taken, stands in `cotenant.tlsfiles`.
"""

from __future__ import annotations

from typing import Any

import grpc

from cotenant.tlsfiles import BadTls, Material, TlsFiles, Watched, load

__all__ = [
    "BadTls",
    "Material",
    "TlsFiles",
    "Watched",
    "channel_credentials",
    "handshake_word",
    "load",
    "server_credentials",
]


def server_credentials(watched: Watched) -> Any:
    """Make credentials that show at each handshake what the files are then."""
    if watched.material.cert is None:
        raise BadTls("TLS_FILE_MISSING", "a server shows a certificate: --tls-cert and --tls-key")
    taken = watched.generation

    def configuration() -> Any:
        material = watched.material
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.cert)], root_certificates=material.ca if _mutual(watched) else None
        )

    def fetch() -> Any:
        nonlocal taken
        if watched.look() == taken:
            return None
        taken = watched.generation
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=_mutual(watched))


def _mutual(watched: Watched) -> bool:
    return watched.files.client_certificates


def channel_credentials(material: Material) -> Any:
    """Make a client's credentials."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


# What gRPC says of a handshake that failed, in one word of ours -----------------------------------------------------

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
