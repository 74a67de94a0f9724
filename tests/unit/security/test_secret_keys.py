"""The file of keys, and what it seals."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cotenant.security.secret_keys import KEYS_FILE, BadKeys, SecretKeys, read_keys


@pytest.fixture
def keys(tmp_path: Path) -> SecretKeys:
    made = SecretKeys(tmp_path / "state" / KEYS_FILE)
    made.create()
    return made


def test_a_value_opens_only_under_its_own_tenant_and_name(keys: SecretKeys) -> None:
    sealed = keys.seal("lab", "TOKEN", b"value")
    assert b"value" not in sealed.ciphertext
    assert keys.open("lab", "TOKEN", sealed) == b"value"
    assert keys.seal("lab", "TOKEN", b"value").ciphertext != sealed.ciphertext
    for tenant, name in (("vision", "TOKEN"), ("lab", "OTHER")):
        with pytest.raises(BadKeys, match="was changed"):
            keys.open(tenant, name, sealed)
    with pytest.raises(BadKeys, match="was changed"):
        keys.open("lab", "TOKEN", sealed._replace(ciphertext=sealed.ciphertext[:-1] + b"x"))


def test_a_rotated_key_seals_and_the_one_of_before_still_opens(keys: SecretKeys) -> None:
    before = keys.seal("lab", "TOKEN", b"value")
    other = SecretKeys(keys.path)  # another process
    assert other.current() == before.key_id
    fresh = keys.rotate()
    assert (other.current(), keys.seal("lab", "TOKEN", b"value").key_id) == (fresh, fresh)
    assert other.open("lab", "TOKEN", before) == b"value"


def test_the_file_is_private_and_is_made_once(keys: SecretKeys) -> None:
    content = keys.path.read_bytes()
    SecretKeys(keys.path).create()
    assert keys.path.read_bytes() == content
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    keys.path.chmod(0o644)
    with pytest.raises(BadKeys, match="chmod 600"):
        SecretKeys(keys.path).current()


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"keys": []}', b'{"keys": [{"id": "a", "key": "QQ=="}]}', b"[" * 99999]
)
def test_a_damaged_file_is_named(content: bytes) -> None:
    with pytest.raises(BadKeys, match=r"secrets\.key is damaged"):
        read_keys(content, KEYS_FILE)
