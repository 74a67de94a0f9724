"""What a server is guarded with, in one piece, so that each service need only pass it on."""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.security.audit import Audit
from cotenant.security.grpc_tls import Watched
from cotenant.security.identity import Authenticator
from cotenant.security.limits import Limits


@dataclass(frozen=True, slots=True)
class Security:
    """Who is let in, under which certificate, with which limits, and what is written down of it; None: nothing."""

    authenticator: Authenticator | None = None
    tls: Watched | None = None
    limits: Limits | None = None
    audit: Audit | None = None
    message_bytes_max: int = 0  # 0: as the server has it


PLAIN = Security()
