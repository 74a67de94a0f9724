"""Origins on the command line."""

from __future__ import annotations

import pytest

from cotenant.cli.mesh.allowed_origins import read_origins


def test_origins_are_read_as_browsers_send_them() -> None:
    assert read_origins(["https://A.example:443/", "https://a.example", "http://[::1]:80"]) == (
        "https://a.example",
        "http://[::1]",
    )
    for wrong in ("*", "portal.example", "https://a.example/path", "https://a.example:443x", "", "null"):
        with pytest.raises(ValueError, match="must be an origin"):
            read_origins([wrong])
