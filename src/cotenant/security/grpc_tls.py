"""TLS for both ends of a call, from files that may change while a process runs.

A server fetches its certificate at each handshake, so a renewed one is used from the next connection on. A gRPC channel
cannot do that: `channel.Channel` opens a new one when its files have changed. How and when files are read is described
in `cotenant.security.tls_files`.
"""

from __future__ import annotations

from typing import Any

import grpc

from cotenant.security.tls_files import BadTls, Material, TlsFiles, WatchedTlsFiles, load

__all__ = [
    "BadTls",
    "Material",
    "TlsFiles",
    "WatchedTlsFiles",
    "channel_credentials",
    "load",
    "server_credentials",
]


def server_credentials(watched: WatchedTlsFiles) -> Any:
    """Return server credentials that use the current files at each handshake."""
    if watched.material.cert is None:
        raise BadTls("TLS_FILE_MISSING", "a server needs a certificate: pass --tls-cert and --tls-key")
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


def _mutual(watched: WatchedTlsFiles) -> bool:
    return watched.files.client_certificates


def channel_credentials(material: Material) -> Any:
    """Return a client's credentials."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
