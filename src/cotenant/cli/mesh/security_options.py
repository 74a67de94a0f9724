"""What `up` and `serve` are told of certificates, tokens, limits and the audit log, and what is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, usage
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:  # grpc loads only when something is served
    from cotenant.security.grpc_tls import TlsFiles
    from cotenant.security.server_security import Security

Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TlsSection:
    """`[tls]`: files in PEM, and whether clients must show a certificate."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    clients: bool = True


@dataclass(frozen=True, slots=True)
class OidcSection:
    """`[oidc]`: see `cotenant.security.oidc.OidcRules`."""

    issuer: str = ""
    audience: str = ""
    jwks: str = ""
    name_claim: str = "sub"
    role_claim: str = "cotenant_role"
    role_default: str = ""
    tenants_claim: str = "cotenant_tenants"
    leeway_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """`[limits]`: what a user may take, and how many jobs of a tenant may not have ended; 0: any number.

    `bytes_per_tenant` of the store are for the jobs of a tenant that has no limit of its own; 0: a quarter of it.
    """

    calls_per_second: float = 50.0
    calls_at_once: int = 500
    streams: int = 100
    message_bytes: int = 4 * 2**20
    processing_per_second: float = 0.25
    processing_seconds: float = 30.0
    jobs_per_tenant: int = 100_000
    bytes_per_tenant: int = 0


@dataclass(frozen=True, slots=True)
class AuditSection:
    """`[audit]`: where the log is (`audit.jsonl` in the state directory), what it has beside changes, and its bounds.

    A file of `bytes_max` is moved to `….1`, and so on, `files` of them; 0: it grows until somebody moves it.
    """

    path: str = ""
    reads: bool = False
    fsync: bool = False
    bytes_max: int = 100 * 2**20
    files: int = 10


SECTIONS: Mapping[str, type[Any] | None] = {
    "tls": TlsSection,
    "oidc": OidcSection,
    "limits": LimitsSection,
    "audit": AuditSection,
    "bearers": None,  # texts by text: who bears which foreign certificate
    "users": None,  # the same: as whom jobs of a submitter run on this node
}


def wrong_sections(sections: Mapping[str, Any]) -> list[str]:
    """Name everything that is wrong with the sections of a configuration file.

    >>> wrong_sections({"tls": {"crt": "x"}, "users": {"eve": 7}})
    ['tls.crt: no such setting; did you mean cert?', 'users.eve: must be a text, not 7']
    """
    wrong: list[str] = []
    for name, table in sections.items():
        if not isinstance(table, dict):
            wrong.append(f"{name}: must be a table, for example [{name}]")
            continue
        kind = SECTIONS[name]
        known = {field.name: field.default for field in fields(kind)} if kind else dict.fromkeys(table, "")
        for key, value in table.items():
            if key not in known:
                wrong.append(f"{name}.{key}: no such setting{did_you_mean(key, known)}")
            elif told := _unfit(known[key], value):
                wrong.append(f"{name}.{key}: {told}")
    return wrong


def _unfit(default: object, value: object) -> str:
    kinds: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    wanted = type(default)
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and wanted is not bool):
        return f"must be {kinds[wanted]}, not {value!r}"
    if isinstance(value, int | float) and not value >= 0:
        return f"must be 0 or more, not {value!r}"
    return ""


@dataclass(frozen=True, slots=True)
class Guarding:
    """All that was said of security, from flags, the environment and the configuration file."""

    tls: TlsSection
    oidc: OidcSection
    limits: LimitsSection
    audit: AuditSection
    bearers: Mapping[str, str]
    users: Mapping[str, str]
    insecure: bool = False
    only_user: str = ""  # as whom every job runs, so that nobody else may submit; empty where others may

    @property
    def tls_files(self) -> TlsFiles | None:
        """The certificates; None where there are none."""
        from cotenant.security.grpc_tls import TlsFiles

        told = self.tls
        if not told.ca:
            if told.cert or told.key:
                raise usage("a certificate alone does not tell whom to believe: --tls-ca names the authorities")
            return None
        cert, key = (Path(path).expanduser() if path else None for path in (told.cert, told.key))
        return TlsFiles(Path(told.ca).expanduser(), cert, key, told.clients)

    @property
    def mutual(self) -> bool:
        """Whether callers are known by certificates, so that the mesh needs no token of its own."""
        return bool(self.tls.ca) and self.tls.clients


def guarding_of(sections: Sections | None, flags: Flags, *, insecure: bool) -> Guarding:
    """Put together what was said; flags win over the environment, and that over the configuration file."""
    said = sections or {}
    tls = TlsSection(**said.get("tls", {}))
    nearer = [
        {"ca": flags.tls_ca, "cert": flags.tls_cert, "key": flags.tls_key},
        {name: os.environ.get(f"COTENANT_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")},
    ]
    for level in nearer:
        if any(level.values()):
            tls = TlsSection(**level, clients=tls.clients)
            break
    return Guarding(
        tls,
        OidcSection(**said.get("oidc", {})),
        LimitsSection(**said.get("limits", {})),
        AuditSection(**said.get("audit", {})),
        said.get("bearers", {}),
        said.get("users", {}),
        insecure,
    )


def check_listen(listen: str, guarding: Guarding) -> None:
    """Refuse to be reached from elsewhere without TLS.

    Raises:
        CommandError: what is to be done instead.
    """
    from cotenant.rpc.access import is_local
    from cotenant.rpc.endpoints import host_and_port

    try:
        local = is_local(host_and_port(listen)[0])
    except ValueError:
        return  # whoever listens there says what is wrong with it
    if guarding.tls.ca or guarding.insecure or local:
        return
    raise usage(
        f"{listen} can be reached from other machines, and without TLS everybody on the way reads the token",
        hint="`cotenant certs init` makes certificates for --tls-ca, --tls-cert and --tls-key; "
        "--insecure serves without, on a network that you trust",
    )


def security_of(guarding: Guarding, state_dir: Path, service: str, token: str) -> Security:
    """Make what guards a server, and let this process call others with its certificate.

    Raises:
        CommandError: certificates, keys or settings cannot be used.
    """
    from cotenant.cli.mesh.shared_identity import refusal_of
    from cotenant.rpc import channel
    from cotenant.security.audit import AUDIT_FILE, Audit
    from cotenant.security.credentials import Credentials
    from cotenant.security.grpc_tls import BadTls, Watched
    from cotenant.security.limits import LimitRules, Limits
    from cotenant.security.oidc import BadOidc, Oidc, OidcRules
    from cotenant.security.one_user import OneUser
    from cotenant.security.server_security import Security
    from cotenant.security.tokens import TOKENS_FILE, TokenFile

    told = guarding.oidc
    limits, audit = guarding.limits, guarding.audit
    try:
        files = guarding.tls_files
        if files is not None and files.cert is None:
            raise usage("a server shows a certificate: --tls-cert and --tls-key name it")
        channel.secure(files)
        rules = OidcRules(**{field.name: getattr(told, field.name) for field in fields(OidcSection)})
        oidc = Oidc(rules) if told.issuer or told.audience or told.jwks else None
        known = Credentials(token, TokenFile(state_dir / TOKENS_FILE), oidc, guarding.bearers)
        credentials = OneUser(known, refusal_of(guarding)) if guarding.only_user else known
        tls = Watched(files) if files else None
    except (BadTls, BadOidc, ValueError) as error:
        raise usage(str(error)) from None
    rates = LimitRules(
        limits.calls_per_second,
        limits.calls_at_once,
        limits.streams,
        limits.processing_per_second,
        limits.processing_seconds,
    )
    path = Path(audit.path).expanduser() if audit.path else state_dir / AUDIT_FILE
    return Security(
        credentials,
        tls,
        Limits(rates),
        Audit(path, service, reads=audit.reads, fsync=audit.fsync, bytes_max=audit.bytes_max, files=audit.files),
        limits.message_bytes,
    )


def secure_calls(guarding: Guarding) -> None:
    """Let a process that serves nothing call others with its certificate.

    Raises:
        CommandError: it cannot be used.
    """
    from cotenant.rpc import channel
    from cotenant.security.grpc_tls import BadTls

    try:
        channel.secure(guarding.tls_files)
    except BadTls as error:
        raise usage(str(error)) from None


def unwritable(path: Path, error: OSError) -> CommandError:
    """A file of ours cannot be written."""
    return CommandError(f"cannot write {path}: {error.strerror}")
