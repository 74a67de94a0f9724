from __future__ import annotations

import subprocess
import sys


def test_an_agent_does_not_load_what_only_deciding_needs() -> None:
    script = "import sys, cotenant.node_agent.agent, cotenant.node_agent.supervise; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "scipy", "lightgbm", "sqlite3", "cotenant.core.policy"} & set(loaded)
