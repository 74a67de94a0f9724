"""The operator's rules for notifications: what may be sent where, and with which keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from cotenant.core.model.notification import HTTP, MAIL, Network, host_of, is_allowed, scheme_of
from cotenant.core.model.validation import Violation

ASK_OPERATOR = "ask an operator to set {} in [notifications], or submit with --no-notify"


@dataclass(frozen=True, slots=True)
class SmtpRules:
    """The mail server."""

    host: str
    port: int
    sender: str
    user: str = ""
    password: str = field(default="", repr=False)
    starttls: bool = True
    ca_file: str = ""


@dataclass(frozen=True, slots=True)
class NotificationRules:
    """What is sent, and how often. Without a signing key there are no webhooks, without a mail server no e-mail."""

    signing_key: bytes = field(default=b"", repr=False)
    tenant_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    allowed: tuple[Network, ...] = ()  # internal networks that may be reached, also without TLS
    ca_file: str = ""  # certificate authorities beside the system's
    smtp: SmtpRules | None = None
    give_up_seconds: float = 6 * 3600.0
    per_minute: int = 60  # for each tenant, and for each host
    timeout_seconds: float = 10.0
    pending_max: int = 1_000  # for each tenant

    def key_of(self, tenant: str) -> bytes:
        """Return the key that signs the notifications of a tenant."""
        return self.tenant_keys.get(tenant) or self.signing_key


OFF = NotificationRules()


def violations(targets: Sequence[str], rules: NotificationRules) -> Iterator[Violation]:
    """Yield why valid targets of a new job cannot be notified in this mesh.

    >>> [one.description for one in violations(["https://10.0.0.1/x"], NotificationRules(b"key"))]
    ['has an internal address; ask an operator to set allow_networks in [notifications], or submit with --no-notify']
    """
    for place, target in enumerate(targets):
        if reason := _refusal(target, rules):
            yield Violation(f"spec.notify[{place}]", reason)


def _refusal(target: str, rules: NotificationRules) -> str:
    if scheme_of(target) == MAIL:
        return "" if rules.smtp else f"this mesh sends no e-mail; {ASK_OPERATOR.format('smtp_server')}"
    if not rules.signing_key:
        return f"this mesh calls no webhooks; {ASK_OPERATOR.format('signing_key_file')}"
    if scheme_of(target) == HTTP and not rules.allowed:
        return f"must be https: plain http is only for networks of this mesh; {ASK_OPERATOR.format('allow_networks')}"
    try:
        address = ip_address(host_of(target))
    except ValueError:
        return "" if host_of(target) != "localhost" or rules.allowed else _internal()
    return "" if is_allowed(address, rules.allowed) else _internal()


def _internal() -> str:
    return f"has an internal address; {ASK_OPERATOR.format('allow_networks')}"
