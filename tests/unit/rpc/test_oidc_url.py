"""Fetching an identity provider's keys: discovery, changed keys, and an unavailable or faulty provider."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from cotenant.codec.errors import Problem
from cotenant.security.certificates import Authority
from cotenant.security.oidc import AGAIN_SECONDS, OLD_SECONDS, WELL_KNOWN, BadOidc, Oidc, OidcRules
from cotenant.security.subjects import Subject

WAIT_SECONDS_MAX = 60.0


class Provider:
    """An issuer on loopback with answers set by the test; it can be stopped and started."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.keys: dict[str, Any] = {}
        self.answers: dict[str, bytes] = {}  # instead of its regular answers
        self.redirects: dict[str, str] = {}
        self.asked: list[str] = []
        self.away = False
        self.proceed = threading.Event()  # cleared, answers wait for it
        self.proceed.set()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the base's name
                provider.asked.append(self.path)
                provider.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.issuer = f"{'https' if context else 'http'}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.rotate("first")

    def answer(self, handler: Any) -> None:
        path = handler.path
        self.proceed.wait(WAIT_SECONDS_MAX)
        if self.away:
            handler.wfile.write(b"gone\r\n\r\n")  # not HTTP
        elif path in self.redirects:
            handler.send_response(302)
            handler.send_header("Location", self.redirects[path])
            handler.end_headers()
        else:
            told = self.answers.get(path)
            if told is None and path == WELL_KNOWN:
                told = json.dumps({"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys"}).encode()
            elif told is None:
                told = json.dumps({"keys": [_shown(key_id, key) for key_id, key in self.keys.items()]}).encode()
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(told)

    def rotate(self, key_id: str) -> None:
        """Replace the old keys by a new one."""
        self.keys = {key_id: ec.generate_private_key(ec.SECP256R1())}

    def token(self, key: Any = None, key_id: str = "") -> str:
        known, newest = next(iter(self.keys.items()))
        told = {"iss": self.issuer, "aud": "cotenant", "sub": "eve", "exp": time.time() + 60, "cotenant_role": "user"}
        told["cotenant_tenants"] = "lab"
        return jwt.encode(told, key or newest, "ES256", headers={"kid": key_id or known})

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _shown(key_id: str, key: Any) -> dict[str, Any]:
    shown: dict[str, Any] = jwt.get_algorithm_by_name("ES256").to_jwk(key.public_key(), as_dict=True)
    return {**shown, "kid": key_id, "alg": "ES256", "use": "sig"}


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


class Checked:
    """A token validator with its own clock."""

    def __init__(self, provider: Provider, jwks: str = "") -> None:
        self.now = 0.0
        self.provider = provider
        self.oidc = Oidc(OidcRules(provider.issuer, "cotenant", jwks), clock=lambda: self.now)

    def word(self, token: str) -> str:
        """Return the name of a token's subject, or why it is rejected."""
        try:
            return self.oidc.check(token).name
        except Problem as problem:
            return problem.reason

    def until(self, token: str, wanted: str) -> None:
        _until(lambda: self.word(token) == wanted)


def _until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def test_keys_are_discovered_from_the_issuer(provider: Provider) -> None:
    checked = Checked(provider)
    checked.until(provider.token(), "eve")
    assert provider.asked == [WELL_KNOWN, "/keys"]


def test_a_url_of_keys_needs_no_discovery(provider: Provider) -> None:
    checked = Checked(provider, f"{provider.issuer}/elsewhere")
    checked.until(provider.token(), "eve")
    assert provider.asked == ["/elsewhere"]


def test_a_changed_key_is_fetched_at_once_but_not_repeatedly(provider: Provider) -> None:
    checked = Checked(provider)
    old = provider.token()
    checked.until(old, "eve")
    provider.rotate("second")
    new, asked = provider.token(), len(provider.asked)
    assert [checked.word(new) for _ in range(3)] == ["TOKEN_KEY_UNKNOWN"] * 3
    assert len(provider.asked) == asked  # it was fetched just now
    checked.now += AGAIN_SECONDS + 1
    checked.until(new, "eve")
    assert checked.word(old) == "TOKEN_KEY_UNKNOWN"  # the provider no longer trusts it
    for _ in range(20):
        checked.word(provider.token(key_id="guessed"))
    assert len(provider.asked) == asked + 2


def test_a_key_that_is_missed_during_a_fetch_is_fetched_after_it(provider: Provider) -> None:
    checked = Checked(provider)
    checked.until(provider.token(), "eve")
    asked = len(provider.asked)
    provider.answers = {"/keys": b'{"keys": []}'}
    provider.rotate("second")
    provider.proceed.clear()
    for _ in range(2):  # the first starts a fetch, which goes on during the second
        checked.now += AGAIN_SECONDS + 1
        assert checked.word(provider.token()) == "TOKEN_KEY_UNKNOWN"
    provider.proceed.set()
    _until(lambda: len(provider.asked) == asked + 2)
    provider.answers = {}
    checked.until(provider.token(), "eve")


def test_tokens_with_known_keys_work_while_the_issuer_is_unavailable(provider: Provider) -> None:
    checked = Checked(provider)
    token, forged = provider.token(), provider.token(ec.generate_private_key(ec.SECP256R1()))
    checked.until(token, "eve")
    provider.away = True
    checked.now += OLD_SECONDS + 1
    checked.until(provider.token(key_id="third"), "TOKEN_KEYS_AWAY")
    assert checked.word(token) == "eve"
    assert checked.word(forged) == "TOKEN_WRONG"
    provider.away = False
    provider.rotate("third")
    checked.now += AGAIN_SECONDS + 1
    checked.until(provider.token(), "eve")


def test_an_issuer_that_was_never_reachable_is_reported_as_unavailable(provider: Provider) -> None:
    provider.away = True
    checked = Checked(provider)
    checked.until(provider.token(), "TOKEN_KEYS_AWAY")


ODD = {
    "another issuer": {WELL_KNOWN: b'{"issuer": "https://evil.example", "jwks_uri": "https://evil.example/keys"}'},
    "no address": {WELL_KNOWN: b"{}"},
    "no JSON": {WELL_KNOWN: b"<html>"},
    "a list": {WELL_KNOWN: b"[]"},
    "deep": {WELL_KNOWN: b"[" * 100_000},
    "no keys": {"/keys": b'{"keys": []}'},
    "odd keys": {"/keys": b'{"keys": [{"kty": 7}]}'},
    "deep keys": {"/keys": b"[" * 100_000},
}


@pytest.mark.parametrize("what", ODD)
def test_invalid_issuer_responses_get_a_clear_error(provider: Provider, what: str) -> None:
    provider.answers = ODD[what]
    Checked(provider).until(provider.token(), "TOKEN_KEYS_AWAY")


def test_redirects_to_unprotected_connections_are_refused(provider: Provider) -> None:
    provider.redirects = {"/keys": "http://evil.example/keys"}
    checked = Checked(provider)
    checked.until(provider.token(), "TOKEN_KEYS_AWAY")
    provider.redirects = {"/keys": "/moved"}
    checked.now += AGAIN_SECONDS + 1
    checked.until(provider.token(), "eve")
    with pytest.raises(BadOidc, match="use https"):
        Oidc(OidcRules("http://login.example", "cotenant"))


def test_keys_come_by_https_from_servers_that_the_system_trusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    authority.create()
    issued = authority.issue(Subject.parse("service/login"), ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.path, issued.key_path)
    provider = Provider(context)
    try:
        Checked(provider).until(provider.token(), "TOKEN_KEYS_AWAY")  # the authority is not trusted
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert_path))
        Checked(provider).until(provider.token(), "eve")
    finally:
        provider.close()
