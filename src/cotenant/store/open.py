"""Opens a store from its URL."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cotenant.security.tls_files import BadTls, TlsFiles, WatchedTlsFiles
from cotenant.store.capacity import NO_LIMITS, StoreLimits
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
    """Open the store of a URL, as `open_raw` does; its revisions continue from those of the previous store.

    Large parts of specs are stored separately in it, and records are read whole. It is used only while it is not older
    than what was seen of it, and not replaced; `memory` is the file in which that is remembered over restarts.
    """
    store = SpecStore(await open_raw(url, limits))
    return store if url == "memory:" else GuardedStore(store, memory)


async def open_raw(url: str, limits: StoreLimits = NO_LIMITS) -> Store:
    """Open the store of a URL: `memory:`, `sqlite:PATH`, `etcd://HOST:PORT,HOST:PORT` or, with TLS, `etcds://…`.

    For the last, COTENANT_ETCD_CA names the trusted authorities (else the system's), and COTENANT_ETCD_CERT with
    COTENANT_ETCD_KEY the client certificate. Files may change while the store is open.

    Raises `ValueError` for any other URL, `StoreInUse` if the file is open elsewhere, and `StoreUnavailable` if it
    cannot be opened. An etcd need not be available yet.
    """
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        return MemoryStore()
    if colon and scheme == "sqlite":
        return SqliteStore(path_of(url, rest), reserve_bytes=limits.reserve_bytes)
    if colon and scheme in ("etcd", "etcds"):
        from cotenant.store.etcd import EtcdStore  # with its client, which other stores do without

        tls = tls_of(os.environ) if scheme == "etcds" else None
        return EtcdStore(endpoints_of(url, rest), tls=tls, quota_bytes=limits.quota_bytes)
    raise ValueError(f"invalid store URL {url!r}: {advice(scheme)}")


def advice(scheme: str) -> str:
    """Return what a URL may look like, the likeliest form first.

    >>> advice("sqlit")
    'did you mean sqlite:PATH?'
    """
    near = difflib.get_close_matches(scheme.lower(), FORMS, n=2)
    if near:
        return f"did you mean {' or '.join(FORMS[name] for name in near)}?"
    return f"expected one of {', '.join(FORMS.values())}"


def path_of(url: str, rest: str) -> str:
    """Return the path of an SQLite file. `sqlite:///x` is the absolute path `/x`, as elsewhere."""
    path = rest.removeprefix("//") if rest.startswith("///") else rest
    if not path or path.startswith("//") or path == ":memory:":
        raise ValueError(f"invalid store URL {url!r}: expected {FORMS['sqlite']}, or memory: for no persistence")
    return path


def endpoints_of(url: str, rest: str) -> list[str]:
    """Return the endpoints of an etcd cluster.

    >>> endpoints_of("etcd://a:2379,[::1]:2380", "//a:2379,[::1]:2380")
    ['a:2379', '[::1]:2380']
    """
    endpoints = [endpoint.strip() for endpoint in rest.removeprefix("//").split(",")]
    if not rest.startswith("//") or not all(map(is_endpoint, endpoints)):
        raise ValueError(f"invalid store URL {url!r}: expected {FORMS['etcd']}")
    return endpoints


def tls_of(environment: Mapping[str, str]) -> WatchedTlsFiles:
    """Return the TLS files of an etcd client, which may change later.

    Raises:
        ValueError: a file cannot be read or used, or only one of certificate and key is set.
    """
    if bool(environment.get(TLS_CERT)) != bool(environment.get(TLS_KEY)):
        raise ValueError(f"{TLS_CERT} and {TLS_KEY} must both be set: one of them is missing")
    named = (environment.get(name) for name in (TLS_CA, TLS_CERT, TLS_KEY))
    ca, cert, key = (Path(path) if path else None for path in named)
    try:
        return WatchedTlsFiles(TlsFiles(ca, cert, key, of_others=True))
    except BadTls as error:
        raise ValueError(f"{TLS_CA}, {TLS_CERT} and {TLS_KEY}: {error}") from None


def is_endpoint(text: str) -> bool:
    """Return whether a text is a host and a port."""
    match = ENDPOINT.fullmatch(text)
    return match is not None and 0 < int(match[2]) < 65_536
