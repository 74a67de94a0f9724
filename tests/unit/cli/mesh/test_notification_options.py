"""The operator's settings of notifications become rules, and every mistake is named."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path

import pytest

from cotenant.cli.mesh.notification_options import notification_rules
from cotenant.cli.mesh.settings import read_settings
from cotenant.cli.outcome import CommandError
from cotenant.services.queue.notifications.rules import OFF, SmtpRules

KEY = "0123456789abcdef"


def test_without_settings_nothing_is_sent() -> None:
    assert notification_rules(None) is OFF
    assert notification_rules({"tls": {}}) is OFF


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    for name, text in (("key", KEY), ("vision", KEY[::-1]), ("password", "s3cret\n")):
        (tmp_path / name).write_text(text)
    path = tmp_path / "mesh.toml"
    path.write_text(
        f'[notifications]\nsigning_key_file = "{tmp_path}/key"\nallow_networks = "10.0.0.0/8, fd00::/8"\n'
        'smtp_server = "smtp.example.org"\nsmtp_from = "c@example.org"\nsmtp_user = "c"\n'
        f'smtp_password_file = "{tmp_path}/password"\ngive_up_hours = 2\n'
        f'[notification_keys]\nvision = "{tmp_path}/vision"\n'
    )
    rules = notification_rules(read_settings(path).sections)
    assert rules.key_of("speech") == KEY.encode()
    assert rules.key_of("vision") == KEY[::-1].encode()
    assert rules.allowed == (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))
    assert rules.smtp == SmtpRules("smtp.example.org", 587, "c@example.org", "c", "s3cret")
    assert rules.give_up_seconds == 7200.0
    assert "s3cret" not in repr(rules)
    assert KEY not in repr(rules)


def test_every_mistake_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    wrong = {
        "signing_key_file": str(tmp_path / "short"),
        "allow_networks": "10.0.0.1/8, all",
        "smtp_server": "smtp.example.org:port",
        "ca_file": str(tmp_path / "none"),
        "per_minute": 0,
    }
    with pytest.raises(CommandError) as error:
        notification_rules({"notifications": wrong, "notification_keys": {"vision": str(tmp_path / "none")}})
    found = "\n".join(error.value.details)
    for part in (
        "signing_key_file: ", "has 5 bytes", "10.0.0.1/8 has host bits set", "'all' does not appear",
        "notifications.smtp_server: must be HOST", "ca_file: ", "per_minute: ", "notification_keys.vision: cannot read",
    ):  # fmt: skip
        assert part in found
