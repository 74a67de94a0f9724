"""The sockets of processes that serve HTTP."""

from __future__ import annotations

import json

import pytest

from cotenant.cli.mesh.http_process import bind, command
from cotenant.cli.outcome import CommandError

HINT = "choose another port"


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with bind("it", "127.0.0.1", 0, HINT) as first:
        port = first.getsockname()[1]
        with pytest.raises(CommandError, match=f"127.0.0.1:{port}") as caught:
            bind("it", "127.0.0.1", port, HINT)
    assert caught.value.hint == HINT


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(CommandError, match="cannot listen"):
        bind("it", "127.0.0.1", port, HINT)


def test_the_command_carries_its_settings() -> None:
    assert json.loads(command("json", {"fd": 3})[-1]) == {"fd": 3}
