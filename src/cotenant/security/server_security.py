"""The security settings of a server in one value, so that services only pass it on."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.security.audit import Audit
from cotenant.security.grpc_tls import WatchedTlsFiles
from cotenant.security.identity import Authenticator
from cotenant.security.limits import Limits


@dataclass(frozen=True, slots=True)
class Security:
    """Authentication, TLS, limits and audit log of a server; None: without."""

    authenticator: Authenticator | None = None
    tls: WatchedTlsFiles | None = None
    limits: Limits | None = None
    audit: Audit | None = None
    message_bytes_max: int = 0  # 0: the server's default


PLAIN = Security()
