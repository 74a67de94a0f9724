"""The dashboard of `up`, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cotenant.cli.mesh import login_links
from cotenant.cli.mesh.http_process import HttpProcess, bind

MODULE = "cotenant.web"
NAME, HINT = "the dashboard", "choose another --web-port, or --no-web"
NO_TLS: Mapping[str, str] = {}


class Dashboard(HttpProcess):
    """The dashboard on a loopback port."""

    def __init__(self, state_dir: Path, port: int, tls: Mapping[str, str] = NO_TLS, trace_url: str = "") -> None:
        settings = {"state_dir": str(state_dir), "trace_url": trace_url, **tls}
        super().__init__(MODULE, bind(NAME, "127.0.0.1", port, HINT), settings)
        self._state_dir = state_dir

    def link(self) -> str:
        """Return a new link that logs in once."""
        return f"http://127.0.0.1:{self.port}/login?token={login_links.mint(self._state_dir)}"
