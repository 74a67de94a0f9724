"""Notifications about a job: whom, when, and which are due.

A target is a URL that gets a POST request, or `mailto:ADDRESS`. A URL may be a secret by itself, as those of chat
services are, so only its host is ever shown. What is due follows from what has happened to the job, so it can be
computed again after a restart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import SplitResult, urlsplit

from cotenant.core.model.lifecycle import Phase

TARGETS_MAX = 4
TARGET_LENGTH_MAX = 2048
MAIL, HTTPS, HTTP = "mailto", "https", "http"
SCHEMES = (HTTPS, HTTP, MAIL)
PORTS = {HTTPS: 443, HTTP: 80}
REDACTED = "…"
FIRST_RETRY_SECONDS = 5.0
RETRY_SECONDS_MAX = 900.0

_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*\.?")
_MAILBOX = re.compile(r"[A-Za-z0-9_%+'-]+(\.[A-Za-z0-9_%+'-]+)*")
_MAILBOX_LENGTH_MAX = 64

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class Trigger(StrEnum):
    """When a notification is sent."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STARTED = "started"


ENDS = (Trigger.SUCCEEDED, Trigger.FAILED, Trigger.CANCELLED)  # unless the job says otherwise


@dataclass(frozen=True, slots=True)
class Due:
    """A notification that is due: what happened, when, and the index of its target."""

    trigger: Trigger
    since: float
    target: int

    @property
    def key(self) -> str:
        """Its name among the notifications about one job.

        >>> Due(Trigger.FAILED, 0.0, 1).key
        'failed/1'
        """
        return f"{self.trigger}/{self.target}"


# Targets -----------------------------------------------------------------------------------------------------


def target_error(target: str) -> str:
    """Return why a target is invalid, without the parts of it that may be secret; "" if it is valid.

    >>> target_error("https://hooks.example.org/T0/s3cret"), target_error("mailto:ada@example.org")
    ('', '')
    >>> target_error("ftp://example.org/x")
    'must begin with https://, http:// or mailto:'
    """
    if len(target) > TARGET_LENGTH_MAX:
        return f"has {len(target)} characters; {TARGET_LENGTH_MAX} are allowed at most"
    if REDACTED in target:
        return "is redacted, as the queue shows it; write the whole URL or address"
    if not target.isascii() or not target.isprintable() or " " in target:
        return "must have printable ASCII characters only, without spaces"
    if target.startswith(f"{MAIL}:"):
        return _mail_error(target.removeprefix(f"{MAIL}:"))
    if not target.lower().startswith((f"{HTTPS}://", f"{HTTP}://")):
        return "must begin with https://, http:// or mailto:"
    return _url_error(target)


def _mail_error(address: str) -> str:
    mailbox, at, host = address.rpartition("@")
    if not at or len(mailbox) > _MAILBOX_LENGTH_MAX or not _MAILBOX.fullmatch(mailbox):
        return "needs one address, such as mailto:ada@example.org"
    return "" if _HOST.fullmatch(host.lower()) else "needs a host name after the @"


def _url_error(target: str) -> str:
    try:
        url = urlsplit(target)
        port, host = url.port, url.hostname or ""
        if port == 0:
            return "has a port that is not from 1 to 65535"
        if ":" in host:
            IPv6Address(host)
    except ValueError:
        return "has an invalid host or port"
    if "@" in url.netloc:
        return "must have no user name or password; put a secret into its path or query"
    if url.fragment:
        return "must have no fragment (#), which is never sent"
    return "" if ":" in host or _HOST.fullmatch(host) else "has no valid host"


def scheme_of(target: str) -> str:
    """Return the scheme of a valid target."""
    return target.partition(":")[0].lower()


def host_of(target: str) -> str:
    """Return the host of a valid target, also of one that is redacted.

    >>> host_of("https://Hooks.example.org:8443/s3cret"), host_of("mailto:ada@example.org")
    ('hooks.example.org', 'example.org')
    """
    if scheme_of(target) == MAIL:
        return target.rpartition("@")[2].lower()
    return urlsplit(target).hostname or ""


def redacted(target: str) -> str:
    """Return a valid target with its scheme and its host only.

    >>> redacted("https://hooks.example.org:8443/s3cret"), redacted("mailto:ada@example.org")
    ('https://hooks.example.org:8443/…', 'mailto:…@example.org')
    """
    if scheme_of(target) == MAIL:
        return f"{MAIL}:{REDACTED}@{host_of(target)}"
    url = urlsplit(target)
    return f"{url.scheme}://{url.netloc.lower()}/{REDACTED}"


def url_of(target: str) -> SplitResult:
    """Return the parts of a valid URL."""
    return urlsplit(target)


def is_allowed(address: Address, allowed: Collection[Network]) -> bool:
    """Return whether notifications may be sent to an address: a public one, or one in a network that is allowed.

    An IPv6 address that stands for an IPv4 address is judged as that.

    >>> from ipaddress import ip_address, ip_network
    >>> [is_allowed(ip_address(one), ()) for one in ("8.8.8.8", "10.0.0.1", "127.0.0.1", "::ffff:127.0.0.1")]
    [True, False, False, False]
    >>> is_allowed(ip_address("10.0.0.1"), [ip_network("10.0.0.0/8")])
    True
    """
    plain = _embedded(address)
    if any(plain.version == network.version and plain in network for network in allowed):
        return True
    return plain.is_global and not plain.is_multicast and not plain.is_reserved


def is_listed(address: Address, allowed: Collection[Network]) -> bool:
    """Return whether an address is in a network that is allowed explicitly."""
    plain = _embedded(address)
    return any(plain.version == network.version and plain in network for network in allowed)


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for; else the address."""
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None) or address


# What is due -------------------------------------------------------------------------------------------------


def due(
    targets: Sequence[str],
    triggers: Collection[Trigger],
    happened: Mapping[Trigger, float],
    done: Collection[str],
) -> Iterator[Due]:
    """Yield the notifications that are due and not done, given what has happened and when.

    >>> happened = {Trigger.STARTED: 5.0, Trigger.FAILED: 9.0}
    >>> [one.key for one in due(["mailto:a@b.org", "https://c.org"], (), happened, ["failed/0"])]
    ['failed/1']
    """
    wanted = triggers or ENDS
    for trigger, since in happened.items():
        for index in range(len(targets)):
            one = Due(trigger, since, index)
            if trigger in wanted and one.key not in done:
                yield one


def end_of(phases: Mapping[Phase, int]) -> Trigger:
    """Return how an array has ended, given the number of its jobs by phase.

    >>> end_of({Phase.SUCCEEDED: 9, Phase.CANCELLED: 1}), end_of({Phase.SUCCEEDED: 9, Phase.FAILED: 1})
    (<Trigger.CANCELLED: 'cancelled'>, <Trigger.FAILED: 'failed'>)
    """
    return next((one for one in (Trigger.FAILED, Trigger.CANCELLED) if phases.get(Phase(one))), Trigger.SUCCEEDED)


def retry_seconds(tries: int, draw: float) -> float:
    """Return how long to wait after a number of failed tries; `draw`, from 0 to 1, spreads receivers' load.

    >>> [retry_seconds(tries, 1.0) for tries in (1, 2, 20)], retry_seconds(1, 0.0)
    ([5.0, 10.0, 900.0], 2.5)
    """
    most = min(RETRY_SECONDS_MAX, FIRST_RETRY_SECONDS * 2.0 ** min(tries - 1, 30))
    return most * (0.5 + 0.5 * draw)
