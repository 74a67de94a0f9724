"""The keys that encrypt tenants' secrets: a file in the state directory, never in the store.

Each value is sealed by AES-256-GCM under a random nonce of its own, and is bound to its tenant and name: a record that
somebody copies to another name does not open. The first key of the file seals; the others only open what was sealed
before the last rotation.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

KEYS_FILE = "secrets.key"
KEY_BYTES, NONCE_BYTES = 32, 12
KEYS_MAX = 1000
FILE_BYTES_MAX = 1 << 20


class BadKeys(Exception):
    """The file of keys cannot be used; the message says why."""


class Sealed(NamedTuple):
    """An encrypted value, and the id of its key."""

    key_id: str
    nonce: bytes
    ciphertext: bytes


class SecretKeys:
    """The file of keys, which is read again whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._keys: Mapping[str, bytes] = {}

    def current(self) -> str:
        """Return the id of the key that seals; "" if there is none yet.

        Raises:
            BadKeys: the file cannot be read.
        """
        return next(iter(self._read()), "")

    def create(self) -> None:
        """Create the file with a first key, unless there is one. Raises `BadKeys`."""
        with self._locked():
            if not self._read():
                self._write([(_new_id(), secrets.token_bytes(KEY_BYTES))])

    def rotate(self) -> str:
        """Add a key, which seals from now on; return its id. Raises `BadKeys`."""
        with self._locked():
            fresh = _new_id()
            self._write([(fresh, secrets.token_bytes(KEY_BYTES)), *self._read().items()][:KEYS_MAX])
            return fresh

    def seal(self, tenant: str, name: str, value: bytes) -> Sealed:
        """Encrypt a secret's value. Raises `BadKeys`."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        keys = self._read()
        if not keys:
            raise BadKeys(f"{self.path} has no key")
        key_id = next(iter(keys))
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Sealed(key_id, nonce, AESGCM(keys[key_id]).encrypt(nonce, value, _bound(tenant, name)))

    def open(self, tenant: str, name: str, sealed: Sealed) -> bytes:
        """Decrypt a secret's value.

        Raises:
            BadKeys: its key is missing, or it was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._read().get(sealed.key_id)
        if key is None:
            raise BadKeys(f"{self.path} does not have the key {sealed.key_id} of the secret {name}")
        try:
            return AESGCM(key).decrypt(sealed.nonce, sealed.ciphertext, _bound(tenant, name))
        except (InvalidTag, ValueError):
            raise BadKeys(f"the stored secret {name} of tenant {tenant} was changed, or is damaged") from None

    def _read(self) -> Mapping[str, bytes]:
        """Return the keys by id, the one that seals first; none without a file."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
                if stamp == self._stamp:
                    return self._keys
                content = file.read(FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            self._stamp, self._keys = None, {}
            return self._keys
        except OSError as error:
            raise BadKeys(f"cannot read {self.path}: {error.strerror}") from None
        if found.st_mode & 0o077:
            raise BadKeys(f"{self.path} may be read by others; run `chmod 600 {self.path}`")
        self._keys, self._stamp = read_keys(content, str(self.path)), stamp
        return self._keys

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BadKeys(f"cannot write {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, keys: list[tuple[str, bytes]]) -> None:
        kept = [{"id": key_id, "key": base64.b64encode(key).decode()} for key_id, key in keys]
        try:
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"keys": kept}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except OSError as error:
            raise BadKeys(f"cannot write {self.path}: {error.strerror}") from None


def read_keys(content: bytes, name: str) -> dict[str, bytes]:
    """Return the keys of a file by id, in order.

    Raises:
        BadKeys: the file is damaged.
    """
    try:
        if len(content) > FILE_BYTES_MAX:
            raise ValueError("it is too large")
        listed = json.loads(content)["keys"]
        found = {str(one["id"]): base64.b64decode(one["key"], validate=True) for one in listed}
        if not found or len(found) != len(listed) or any(len(key) != KEY_BYTES for key in found.values()):
            raise ValueError("its keys are not as written")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadKeys(
            f"{name} is damaged; restore it from a copy, for without its keys no secret can be read"
        ) from None
    return found


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d', time.gmtime())}-{secrets.token_hex(4)}"


def _bound(tenant: str, name: str) -> bytes:
    return f"{tenant}\0{name}".encode()
