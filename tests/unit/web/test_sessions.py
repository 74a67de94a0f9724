"""Sessions end; their secrets are compared as a whole."""

from __future__ import annotations

import pytest

from cotenant.web import sessions as module
from cotenant.web.sessions import IDLE_SECONDS, LIFE_SECONDS, Sessions, same


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_session_ends_when_it_is_not_used_and_after_its_life() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    cookie = sessions.create("token")
    clock.now += IDLE_SECONDS - 1
    found = sessions.find(cookie)
    assert found
    assert found.api_token == "token"
    clock.now += IDLE_SECONDS
    assert sessions.find(cookie) is None
    cookie = sessions.create("token")
    for _ in range(int(LIFE_SECONDS // 600) - 1):
        clock.now += 600
        assert sessions.find(cookie)
    clock.now += 600
    assert sessions.find(cookie) is None


def test_unknown_cookies_have_no_session_and_logging_out_ends_it() -> None:
    sessions = Sessions(Clock())
    cookie = sessions.create("token")
    assert [sessions.find(text) for text in ("", "x", cookie[:-1], "\udcff")] == [None] * 4
    sessions.end(cookie)
    assert sessions.find(cookie) is None


def test_all_sessions_of_a_refused_token_end() -> None:
    sessions = Sessions(Clock())
    cookies = [sessions.create(token) for token in ("a", "b", "a")]
    sessions.end_all_of("a")
    assert [bool(sessions.find(cookie)) for cookie in cookies] == [False, True, False]


def test_the_longest_unused_session_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSIONS_MAX", 2)
    clock = Clock()
    sessions = Sessions(clock)
    first = sessions.create("a")
    clock.now += 1
    second = sessions.create("b")
    clock.now += 1
    sessions.find(first)
    sessions.create("c")
    assert sessions.find(second) is None
    assert sessions.find(first)


def test_an_empty_secret_equals_nothing() -> None:
    assert [same("", ""), same("a", "b"), same("é", "é"), same("a", "a")] == [False, False, True, True]


def test_a_session_does_not_show_its_secrets() -> None:
    sessions = Sessions(Clock())
    found = sessions.find(sessions.create("very-secret"))
    assert found
    assert "very-secret" not in repr(found)
    assert found.csrf not in repr(found)
