"""Tests for disposable virtual machines: `make test-vm`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.node_agent.conftest import agent, agent_process, new_process, placement

__all__ = ["agent", "agent_process", "new_process", "placement"]  # fixtures

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip on other machines: these tests take CPUs offline and cut the power."""
    if "COTENANT_MACHINE" in os.environ:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs on a machine of its own: make test-vm"))
