"""From a URL to a store."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cotenant.security.tls_files import BadTls, TlsFiles, Watched
from cotenant.store.capacity import NO_LIMITS, StoreLimits
from cotenant.store.etcd import EtcdStore
from cotenant.store.guarded_store import GuardedStore
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Store
from cotenant.store.spec_parts import SpecStore
from cotenant.store.sqlite import SqliteStore

FORMS = {
    "memory": "memory:",
    "sqlite": "sqlite:PATH",
    "etcd": "etcd://HOST:PORT,HOST:PORT",
    "etcds": "etcds://HOST:PORT,HOST:PORT",
}
TLS_CA, TLS_CERT, TLS_KEY = "COTENANT_ETCD_CA", "COTENANT_ETCD_CERT", "COTENANT_ETCD_KEY"
ENDPOINT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+):(\d{1,5})")


async def open_store(url: str, memory: Path | None = None, limits: StoreLimits = NO_LIMITS) -> Store:
    """Open the store that a URL names, as `open_raw` does; its revisions go on from those of the store before it.

    Large parts of specs are kept apart in it, and records are read whole. It is used only as long as it is no older
    than what was seen of it, and no other one; `memory` is the file in which that is remembered over restarts.
    """
    store = SpecStore(await open_raw(url, limits))
    return store if url == "memory:" else GuardedStore(store, memory)


async def open_raw(url: str, limits: StoreLimits = NO_LIMITS) -> Store:
    """Open the store that a URL names: `memory:`, `sqlite:PATH`, `etcd://HOST:PORT,HOST:PORT` or, by TLS, `etcds://…`.

    For the last, COTENANT_ETCD_CA names the authorities that are believed (else those of the system), and
    COTENANT_ETCD_CERT with COTENANT_ETCD_KEY what is shown to etcd. Files may change while the store is open.

    Raises `ValueError` for any other, `StoreInUse` where a file is open elsewhere, and `StoreUnavailable` where it
    cannot be opened. An etcd need not be there yet.
    """
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        return MemoryStore()
    if colon and scheme == "sqlite":
        return SqliteStore(path_of(url, rest), reserve_bytes=limits.reserve_bytes)
    if colon and scheme == "etcd":
        return EtcdStore(endpoints_of(url, rest), quota_bytes=limits.quota_bytes)
    if colon and scheme == "etcds":
        return EtcdStore(endpoints_of(url, rest), tls=tls_of(os.environ), quota_bytes=limits.quota_bytes)
    raise ValueError(f"{url!r} names no store: {advice(scheme)}")


def advice(scheme: str) -> str:
    """Say what a URL may look like, the likeliest first.

    >>> advice("sqlit")
    'did you mean sqlite:PATH?'
    """
    near = difflib.get_close_matches(scheme.lower(), FORMS, n=2)
    if near:
        return f"did you mean {' or '.join(FORMS[name] for name in near)}?"
    return f"expected one of {', '.join(FORMS.values())}"


def path_of(url: str, rest: str) -> str:
    """Read the path of an SQLite file. `sqlite:///x` is the absolute path `/x`, as elsewhere."""
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//") or path == ":memory:":
        raise ValueError(f"{url!r} names no file: expected {FORMS['sqlite']}, or memory: to keep nothing")
    return path


def endpoints_of(url: str, rest: str) -> list[str]:
    """Read the endpoints of an etcd cluster.

    >>> endpoints_of("etcd://a:2379,[::1]:2380", "//a:2379,[::1]:2380")
    ['a:2379', '[::1]:2380']
    """
    endpoints = [endpoint.strip() for endpoint in rest.removeprefix("//").split(",")]
    if not rest.startswith("//") or not all(map(is_endpoint, endpoints)):
        raise ValueError(f"{url!r} names no etcd cluster: expected {FORMS['etcd']}")
    return endpoints


def tls_of(environment: Mapping[str, str]) -> Watched:
    """Read what an etcd with TLS asks for, from files that may change later.

    Raises:
        ValueError: a file cannot be read or used, or a certificate has no key, or a key no certificate.
    """
    if bool(environment.get(TLS_CERT)) != bool(environment.get(TLS_KEY)):
        raise ValueError(f"{TLS_CERT} and {TLS_KEY} belong together: one of them is not set")
    named = (environment.get(name) for name in (TLS_CA, TLS_CERT, TLS_KEY))
    ca, cert, key = (Path(path) if path else None for path in named)
    try:
        return Watched(TlsFiles(ca, cert, key, of_others=True))
    except BadTls as error:
        raise ValueError(f"{TLS_CA}, {TLS_CERT} and {TLS_KEY}: {error}") from None


def is_endpoint(text: str) -> bool:
    """Tell whether a text is a host and a port."""
    match = ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[2]) < 65_536
