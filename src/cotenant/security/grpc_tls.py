"""TLS for both ends of a call, from files that may change while a process runs.

A server asks for its certificate at each handshake, so that one that was renewed is used from the next connection on.
A channel of gRPC's cannot: `channel.Channel` opens a new one when its files have changed. How files are read, and when
they are taken, stands in `cotenant.security.tls_files`.
"""

from __future__ import annotations

from typing import Any

import grpc

from cotenant.security.tls_files import BadTls, Material, TlsFiles, Watched, load

__all__ = [
    "BadTls",
    "Material",
    "TlsFiles",
    "Watched",
    "channel_credentials",
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
