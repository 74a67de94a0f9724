"""Which runtime a node has for containers."""

from __future__ import annotations

from cotenant.node_agent.containers.container_runtime import RootlessRuntime, find_runtime


def absent(name: str) -> str | None:
    return None


def test_an_agent_that_is_not_root_needs_namespaces_and_mounts_but_no_program() -> None:
    found = find_runtime(look_up=absent, own_uid=1000, isolated=True, try_mounts=lambda: "")
    assert (found, str(found)) == (RootlessRuntime(), "rootless")
    assert RootlessRuntime().command("/state") == []
    assert find_runtime(look_up=absent, own_uid=1000, isolated=False, try_mounts=lambda: "") is None
    assert find_runtime(look_up=absent, own_uid=1000, isolated=True, try_mounts=lambda: "no overlayfs") is None


def test_root_needs_crun_whatever_namespaces_can_do() -> None:
    assert find_runtime(look_up=absent, own_uid=0, isolated=True, try_mounts=lambda: "") is None
