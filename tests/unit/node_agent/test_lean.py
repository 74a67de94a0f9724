from __future__ import annotations

import json
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from cotenant.node_agent.runtime.supervisor_start import SUPERVISOR
from cotenant.node_agent.supervisor.plain_json import dumps


def test_an_agent_does_not_load_scheduling_code() -> None:
    modules = "cotenant.node_agent.control.agent, cotenant.node_agent.runtime.process_runtime"
    script = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "scipy", "lightgbm", "sqlite3", "cotenant.core.policy.protocols"} & set(loaded)


def test_a_supervisor_loads_no_slow_modules() -> None:
    script = f"import sys; sys.path.append({str(SUPERVISOR.parent)!r}); import loop; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", script]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"enum", "re", "json", "signal", "socket", "functools"} & set(loaded)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(PLAIN)
def test_state_is_written_as_json(value: object) -> None:
    assert dumps(value) == json.dumps(value)
