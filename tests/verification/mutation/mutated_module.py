"""A plug-in of pytest that runs tests with another text of one module; the files of the checkout stay as they are.

It is loaded before anything of ours is imported. The environment names a file with its orders: see `Orders`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from tests.support.properties import register_profiles

VARIABLE = "COTENANT_MUTATED_MODULE"
NOT_REPLACED = 64  # exit status
MEMORY_BYTES_MAX = 6 << 30  # a loop without an end fills memory as well


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process does: the module, its file and its text there, and how much CPU time it may take.

    Of the files `contracts` only the cases of some `policies` run. What fails is written to `report`, one id a line.
    """

    module: str
    path: str
    source: str
    cpu_seconds: int
    report: str
    contracts: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()

    def write(self, file: Path) -> None:
        """Write them to a file."""
        file.write_text(json.dumps(asdict(self)))


class _Loader(SourceFileLoader):
    """Loads a module as if its file had another text."""

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders.module, orders.path)
        self._source = orders.source

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the given text, past the cache of compiled files."""
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the one module that is replaced."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._orders.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._orders.path, loader=_Loader(self._orders))


class _Plugin:
    """Selects cases of the contract, reports what fails, and makes sure that the module was replaced."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out cases of the contract that are about other policies."""
        items[:] = [item for item in items if not self._is_about_others(item)]

    def _is_about_others(self, item: pytest.Item) -> bool:
        if item.nodeid.partition("::")[0] not in self._orders.contracts:
            return False
        cases = getattr(item, "callspec", None)  # of a parametrized test
        return cases is None or getattr(cases.params.get("plugin"), "name", "") not in self._orders.policies

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._report(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Exit with `NOT_REPLACED` if the tests had the module from its file."""
        module = sys.modules.get(self._orders.module)
        if module and not isinstance(module.__loader__, _Loader):
            session.exitstatus = NOT_REPLACED

    def _report(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            with Path(self._orders.report).open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    if orders := _orders():
        config.pluginmanager.register(_Plugin(orders), "mutated-module")


def _orders() -> Orders | None:
    return Orders(**json.loads(Path(file).read_text())) if (file := os.environ.get(VARIABLE)) else None


register_profiles()  # for runs of which no file is below the conftest that does
if orders := _orders():  # at import: the modules that tests import at collection must find it in place
    resource.setrlimit(resource.RLIMIT_CPU, (orders.cpu_seconds, orders.cpu_seconds + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    sys.meta_path.insert(0, _Finder(orders))
