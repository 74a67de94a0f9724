"""The settings of notifications, `[notifications]` and `[notification_keys]`, as rules for the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.cli.mesh.security_options import NotificationsSection, Sections
from cotenant.cli.outcome import usage_error

if TYPE_CHECKING:
    from cotenant.core.model.notification import Network
    from cotenant.services.queue.notifications.rules import NotificationRules, SmtpRules

KEY_BYTES_MIN = 16
SMTP_PORT = 587


class _Reader:
    """Reads the settings and collects every mistake."""

    def __init__(self, section: NotificationsSection) -> None:
        self.section = section
        self.wrong: list[str] = []

    def secret(self, name: str, path: str, least: int = 1) -> bytes:
        """Return what a file contains, without space around it; b"" if no file is given."""
        if not path:
            return b""
        try:
            found = Path(path).expanduser().read_bytes().strip()
        except (OSError, RuntimeError) as error:
            self.wrong.append(f"{name}: cannot read {path}: {getattr(error, 'strerror', None) or error}")
            return b""
        if len(found) < least:
            self.wrong.append(f"{name}: {path} has {len(found)} bytes; a key needs at least {least}")
        return found

    def networks(self) -> tuple[Network, ...]:
        """Return the networks that may be reached though they are internal."""
        found: list[Network] = []
        for word in filter(None, map(str.strip, self.section.allow_networks.split(","))):
            try:
                found.append(ip_network(word))
            except ValueError as error:
                self.wrong.append(f"notifications.allow_networks: {error}")
        return tuple(found)

    def smtp(self) -> SmtpRules | None:
        """Return the mail server; None if there is none."""
        from cotenant.services.queue.notifications.rules import SmtpRules

        own = self.section
        if not own.smtp_server:
            return None
        host, colon, port = own.smtp_server.rpartition(":")
        if not colon:
            host, port = own.smtp_server, str(SMTP_PORT)
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            self.wrong.append(f"notifications.smtp_server: must be HOST or HOST:PORT, not {own.smtp_server!r}")
            return None
        if "@" not in own.smtp_from or not own.smtp_from.isprintable():
            self.wrong.append(f"notifications.smtp_from: must be an address, not {own.smtp_from!r}")
        if own.smtp_user and not own.smtp_starttls:
            self.wrong.append("notifications.smtp_user: a password is only sent with smtp_starttls = true")
        password = self.secret("notifications.smtp_password_file", own.smtp_password_file).decode(errors="replace")
        return SmtpRules(host, int(port), own.smtp_from, own.smtp_user, password, own.smtp_starttls, own.ca_file)


def notification_rules(sections: Sections | None) -> NotificationRules:
    """Return the rules for notifications; without settings, nothing is sent.

    Raises:
        CommandError: names every invalid setting.
    """
    from cotenant.services.queue.notifications.rules import OFF, NotificationRules

    given: Mapping[str, Any] = sections or {}
    if not given.get("notifications") and not given.get("notification_keys"):
        return OFF
    reader = _Reader(NotificationsSection(**given.get("notifications", {})))
    own = reader.section
    rules = NotificationRules(
        reader.secret("notifications.signing_key_file", own.signing_key_file, KEY_BYTES_MIN),
        {
            tenant: reader.secret(f"notification_keys.{tenant}", path, KEY_BYTES_MIN)
            for tenant, path in given.get("notification_keys", {}).items()
        },
        reader.networks(),
        own.ca_file,
        reader.smtp(),
        own.give_up_hours * 3600,
        own.per_minute,
    )
    reader.wrong += _contradictions(own, rules)
    if reader.wrong:
        raise usage_error("invalid settings of notifications", details=reader.wrong)
    return rules


def _contradictions(own: NotificationsSection, rules: NotificationRules) -> Iterable[str]:
    if rules.tenant_keys and not own.signing_key_file:
        yield "notifications.signing_key_file: is missing: it signs for all tenants without a key of their own"
    if own.per_minute < 1:
        yield "notifications.per_minute: must be at least 1"
    if own.ca_file and not Path(own.ca_file).is_file():
        yield f"notifications.ca_file: {own.ca_file} is not a file"
