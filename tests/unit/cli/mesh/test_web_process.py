"""The socket of the dashboard."""

from __future__ import annotations

import json

import pytest

from cotenant.cli.mesh.web_process import bind, command
from cotenant.cli.outcome import CommandError


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(CommandError, match=f"127.0.0.1:{port}") as caught:
            bind("127.0.0.1", port)
    assert "--web-port" in str(caught.value.hint)


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(CommandError, match="cannot listen"):
        bind("127.0.0.1", port)


def test_the_command_carries_its_settings() -> None:
    assert json.loads(command({"fd": 3})[-1]) == {"fd": 3}
