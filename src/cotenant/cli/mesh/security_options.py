"""Security settings of `up` and `serve`: certificates, tokens, limits, audit log."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:  # grpc is imported only by servers
    from cotenant.security.grpc_tls import TlsFiles
    from cotenant.security.server_security import Security

ALLOW_ORIGIN_HELP = "Site whose pages may call the gateway from a browser; repeatable; default: none."
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TlsSection:
    """`[tls]`: PEM files, and whether clients must present a certificate."""

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
    """`[limits]`: rate limits per user, and live jobs per tenant; 0 means unlimited.

    `bytes_per_tenant` limits the store space for jobs of tenants without their own limit; 0: a quarter of the store.
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
    """`[audit]`: the log's path (default `audit.jsonl` in the state directory), what it records, and its rotation.

    A file that reaches `bytes_max` is rotated to `….1` and so on, keeping `files` of them; 0: no rotation.
    """

    path: str = ""
    reads: bool = False
    fsync: bool = False
    bytes_max: int = 100 * 2**20
    files: int = 10


@dataclass(frozen=True, slots=True)
class NotificationsSection:
    """`[notifications]`: which notifications about jobs are sent; see `cotenant.services.queue.notifications.rules`."""

    signing_key_file: str = ""
    allow_networks: str = ""
    ca_file: str = ""
    smtp_server: str = ""
    smtp_from: str = ""
    smtp_user: str = ""
    smtp_password_file: str = ""
    smtp_starttls: bool = True
    give_up_hours: float = 6.0
    per_minute: int = 60


SECTIONS: Mapping[str, type[Any] | None] = {
    "tls": TlsSection,
    "oidc": OidcSection,
    "limits": LimitsSection,
    "audit": AuditSection,
    "notifications": NotificationsSection,
    "notification_keys": None,  # strings by string: files of the keys that sign the notifications of a tenant
    "bearers": None,  # strings by string: subjects of foreign certificates
    "users": None,  # strings by string: the local user that runs a submitter's jobs
}


def invalid_sections(sections: Mapping[str, Any]) -> list[str]:
    """Return all errors in the sections of a configuration file.

    >>> invalid_sections({"tls": {"crt": "x"}, "users": {"eve": 7}})
    ['tls.crt: unknown setting; did you mean cert?', 'users.eve: must be a string, not 7']
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
                wrong.append(f"{name}.{key}: unknown setting{did_you_mean(key, known)}")
            elif reason := _type_error(known[key], value):
                wrong.append(f"{name}.{key}: {reason}")
    return wrong


def _type_error(default: object, value: object) -> str:
    kinds: Mapping[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    wanted = type(default)
    fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and wanted is not bool):
        return f"must be {kinds[wanted]}, not {value!r}"
    if isinstance(value, int | float) and not value >= 0:
        return f"must be 0 or more, not {value!r}"
    return ""


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """All security settings from flags, the environment and the configuration file."""

    tls: TlsSection
    oidc: OidcSection
    limits: LimitsSection
    audit: AuditSection
    bearers: Mapping[str, str]
    users: Mapping[str, str]
    insecure: bool = False
    only_user: str = ""  # the user all jobs run as, who alone may submit; empty if others may

    @property
    def tls_files(self) -> TlsFiles | None:
        """Return the TLS files; None without certificates."""
        from cotenant.security.grpc_tls import TlsFiles

        tls = self.tls
        if not tls.ca:
            if tls.cert or tls.key:
                raise usage_error("a certificate needs trusted authorities: set --tls-ca")
            return None
        cert, key = (Path(path).expanduser() if path else None for path in (tls.cert, tls.key))
        return TlsFiles(Path(tls.ca).expanduser(), cert, key, tls.clients)

    @property
    def mutual(self) -> bool:
        """Whether callers authenticate by certificate, so that the mesh needs no token of its own."""
        return bool(self.tls.ca) and self.tls.clients


def read_security_settings(sections: Sections | None, flags: Flags, *, insecure: bool) -> SecuritySettings:
    """Return the merged settings; flags override the environment, which overrides the configuration file."""
    given = sections or {}
    tls = TlsSection(**given.get("tls", {}))
    overriding = [
        {"ca": flags.tls_ca, "cert": flags.tls_cert, "key": flags.tls_key},
        {name: os.environ.get(f"COTENANT_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")},
    ]
    for level in overriding:
        if any(level.values()):
            tls = TlsSection(**level, clients=tls.clients)
            break
    return SecuritySettings(
        tls,
        OidcSection(**given.get("oidc", {})),
        LimitsSection(**given.get("limits", {})),
        AuditSection(**given.get("audit", {})),
        given.get("bearers", {}),
        given.get("users", {}),
        insecure,
    )


def check_listen(listen: str, security_settings: SecuritySettings) -> None:
    """Reject a listen address that other machines can reach without TLS.

    Raises:
        CommandError: the address needs TLS or --insecure.
    """
    from cotenant.rpc.access import is_local
    from cotenant.rpc.endpoints import host_and_port

    try:
        local = is_local(host_and_port(listen)[0])
    except ValueError:
        return  # listening on it reports the error
    if security_settings.tls.ca or security_settings.insecure or local:
        return
    raise usage_error(
        f"{listen} is reachable from other machines, and without TLS the token can be intercepted",
        hint="create certificates with `cotenant certs init` and set --tls-ca, --tls-cert and --tls-key; "
        "on a trusted network, --insecure serves without TLS",
    )


def read_allowed_origins(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the origins of `--allow-origin`.

    Raises:
        CommandError: names each that is none.
    """
    if not texts:
        return ()
    from cotenant.cli.mesh.allowed_origins import read_origins  # few gateways are called by pages

    try:
        return read_origins(texts)
    except ValueError as error:
        raise usage_error(f"--allow-origin {error}") from None


def make_security(security_settings: SecuritySettings, state_dir: Path, service: str, token: str) -> Security:
    """Return the security of a server, and make this process use its certificate for calls.

    Raises:
        CommandError: certificates, keys or settings are invalid.
    """
    from cotenant.rpc import channel
    from cotenant.security.audit import AUDIT_FILE, Audit
    from cotenant.security.credentials import Credentials
    from cotenant.security.grpc_tls import BadTls, WatchedTlsFiles
    from cotenant.security.limits import LimitRules, Limits
    from cotenant.security.oidc import BadOidc, Oidc, OidcRules
    from cotenant.security.one_user import SingleUserAuthenticator
    from cotenant.security.server_security import Security
    from cotenant.security.tokens import TOKENS_FILE, TokenFile

    oidc_settings = security_settings.oidc
    limits, audit = security_settings.limits, security_settings.audit
    try:
        files = security_settings.tls_files
        if files is not None and files.cert is None:
            raise usage_error("a server needs a certificate: set --tls-cert and --tls-key")
        channel.secure(files)
        rules = OidcRules(**{field.name: getattr(oidc_settings, field.name) for field in fields(OidcSection)})
        oidc = Oidc(rules) if oidc_settings.issuer or oidc_settings.audience or oidc_settings.jwks else None
        known = Credentials(token, TokenFile(state_dir / TOKENS_FILE), oidc, security_settings.bearers)
        credentials = (
            SingleUserAuthenticator(known, _submit_refusal(security_settings)) if security_settings.only_user else known
        )
        tls = WatchedTlsFiles(files) if files else None
    except (BadTls, BadOidc, ValueError) as error:
        raise usage_error(str(error)) from None
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


def _submit_refusal(security_settings: SecuritySettings) -> Callable[[str], str]:
    """Return a function that returns why a caller may not submit; "" if it may."""
    from cotenant.node_agent.runtime.run_as import runs_as, shared_identity_refusal

    own = security_settings.only_user
    return lambda name: "" if runs_as(own, name, security_settings.users) else shared_identity_refusal(own, name)


def secure_calls(security_settings: SecuritySettings) -> None:
    """Make a process that is not a server use its certificate for calls.

    Raises:
        CommandError: the certificate cannot be used.
    """
    from cotenant.rpc import channel
    from cotenant.security.grpc_tls import BadTls

    try:
        channel.secure(security_settings.tls_files)
    except BadTls as error:
        raise usage_error(str(error)) from None


def unwritable(path: Path, error: OSError) -> CommandError:
    """Return the error that a file cannot be written."""
    return CommandError(f"cannot write {path}: {error.strerror}")
