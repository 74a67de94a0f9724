"""`import cotenant`: cheap, and complete."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cotenant

SCRIPT = """
import sys, time
began = time.perf_counter()
import cotenant
print(time.perf_counter() - began)
print(*sorted(name for name in sys.modules if name.partition(".")[0] not in before))
"""


def test_import_loads_nothing_but_the_package() -> None:
    script = "import sys; before = {name.partition('.')[0] for name in sys.modules}\n" + SCRIPT
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.splitlines()
    assert {name.partition(".")[0] for name in modules.split()} - set(sys.stdlib_module_names) == {"cotenant"}
    assert [name for name in modules.split() if name.startswith("cotenant.")] == []
    assert float(seconds) < 0.5  # an empty package: 50 ms on a machine that is ten times slower


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in cotenant.__all__ if getattr(cotenant, name).__name__ != name] == []
    assert set(cotenant.__all__) <= set(dir(cotenant))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clint'"):
        cotenant.Clint  # noqa: B018 - the access is what is tested
