"""Unresolvable names are problems of the process that uses them."""

from __future__ import annotations

import socket

import pytest

from cotenant.name_resolution import ERRORS_MAX, LOOK_SECONDS, SLOW_SECONDS, SUSTAINED_SECONDS, NameChecks


class User:
    """Uses names for as long as it exists."""


class Server:
    """A name server with a clock."""

    def __init__(self) -> None:
        self.now, self.takes_seconds, self.fails = 100.0, 0.0, True
        self.checks = NameChecks(self.resolve, lambda: self.now)

    def resolve(self, host: str) -> None:
        self.now += self.takes_seconds
        if self.fails:
            raise socket.gaierror(-3, "Temporary failure in name resolution")

    def looks_for(self, seconds: float) -> list[str]:
        until = self.now + seconds
        while self.now < until:
            self.checks.look()
            self.now += LOOK_SECONDS
        return self.checks.errors()


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_name_that_fails_for_long_is_reported_with_the_reason(server: Server) -> None:
    user = User()
    server.checks.watch(user, ["queue.mesh", "10.0.0.1", "::1"])
    assert server.looks_for(LOOK_SECONDS) == []
    assert server.looks_for(SUSTAINED_SECONDS) == ["it cannot resolve queue.mesh: Temporary failure in name resolution"]
    server.fails = False
    assert server.looks_for(LOOK_SECONDS) == []


def test_a_slow_answer_counts_as_a_failure(server: Server) -> None:
    user = User()
    server.fails, server.takes_seconds = False, SLOW_SECONDS + 1
    server.checks.watch(user, ["queue.mesh"])
    assert server.looks_for(2 * SUSTAINED_SECONDS) == ["it cannot resolve queue.mesh: the answer took 3 s"]


def test_an_unanswered_query_is_reported_while_it_waits(server: Server) -> None:
    user, seen = User(), []

    def wait(host: str) -> None:
        server.now += SUSTAINED_SECONDS + 1
        seen.extend(checks.errors())

    checks = NameChecks(wait, lambda: server.now)
    checks.watch(user, ["queue.mesh"])
    checks.look()
    assert seen == ["it cannot resolve queue.mesh: no answer within 13 s"]


def test_unused_names_are_not_reported(server: Server) -> None:
    user, other = User(), User()
    server.checks.watch(user, [f"part-{number}.mesh" for number in range(2 * ERRORS_MAX)])
    server.checks.watch(other, ["queue.mesh"])
    assert len(server.looks_for(2 * SUSTAINED_SECONDS)) == ERRORS_MAX
    del user
    server.checks.drop(other)
    assert server.checks.errors() == []
    assert server.checks.hosts() == []
