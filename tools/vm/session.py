"""Packs the uppermost layer of a machine: the tests, and what is to be run. Made anew each time."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.vm.host import find, run
from tools.vm.layers import ROOT, pack

TESTS = Path("opt/cotenant/tests")
NVML = TESTS / "node_agent/libnvidia-ml.so.1"  # where tests/node_agent/fake_driver.py looks for it


def session(place: Path, script: str) -> Path:
    """The layer with the tests, what they would need a compiler for, and what is to be run; returns its image."""
    tree = place / "tree"
    shutil.copytree(ROOT / "tests", tree / TESTS, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree / "opt/cotenant")
    if gcc := find("gcc"):
        run(gcc, "-shared", "-fPIC", "-o", tree / NVML, ROOT / "tests/node_agent/fake_nvml.c")
    (tree / "session").mkdir()
    (tree / "session" / "run").write_text(script)
    pack(tree, place / "image", "-all-root")
    shutil.rmtree(tree)
    return place / "image"
