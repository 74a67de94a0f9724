"""Runs each law once for each policy that it is about, and says in one sentence which law is broken."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr
from _pytest._io import TerminalWriter

from cotenant import plugins
from cotenant.conformance.selection import selection_of

HERE = Path(__file__).parent
OF_EVERY_GROUP, OF_DECIDING_GROUPS = "every", "deciding"


class BrokenLaw(TerminalRepr):
    """A failure that begins with the law, the policy and the smallest world, before pytest's own report."""

    def __init__(self, title: str, lines: list[str], report: Any) -> None:
        self.title, self.lines, self.report = title, lines, report
        self.reprcrash = getattr(report, "reprcrash", None)
        if self.reprcrash is not None:
            self.reprcrash.message = title

    def toterminal(self, tw: TerminalWriter) -> None:
        """Print it."""
        for line in (self.title, *self.lines, ""):
            tw.line(line)
        self.report.toterminal(tw)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the laws of groups that no selected policy is of."""
    if collection_path.parent != HERE or not collection_path.name.startswith("test_"):
        return None
    return None if any(_is_about(collection_path, plugin) for plugin in selection_of(config)) else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a law for each selected policy of its group; one that does not load has only to load."""
    if "plugin" not in metafunc.fixturenames:
        return
    path = Path(metafunc.module.__file__ or "")
    loads = metafunc.function.__name__ == "test_an_installed_policy_implements_its_protocol"
    about = [one for one in selection_of(metafunc.config) if _is_about(path, one) and (one.healthy or loads)]
    names = [f"{plugin.group.removeprefix('cotenant.')}:{plugin.name}" for plugin in about]
    metafunc.parametrize("plugin", about, ids=names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Begin the report of a broken law with the law."""
    report = yield
    plugin = getattr(getattr(item, "callspec", None), "params", {}).get("plugin")
    if report.failed and call.when == "call" and plugin is not None and call.excinfo is not None:
        law = (inspect.getdoc(getattr(item, "function", None)) or item.name).partition("\n")[0]
        lines = []
        for error in _faults(call.excinfo.value):
            lines.append(f"Broken by {plugin.name} of {plugin.package} {plugin.version}: {_said(error)}")
            lines += [note for note in getattr(error, "__notes__", ()) if not note.startswith("You can")]
        report.longrepr = BrokenLaw(f"Law: {law}", lines, report.longrepr)
    return report


def _faults(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, or those of a group: Hypothesis may have found several."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _faults(one)
    else:
        yield error


def _said(error: BaseException) -> str:
    """Return what an error says, on one line."""
    told = str(error).strip().partition("\n")[0]
    return told if isinstance(error, AssertionError) and told else f"{type(error).__name__}: {told}"


def _is_about(path: Path, plugin: plugins.Plugin) -> bool:
    """Return whether the laws in a file, which is named after their group, are about a policy."""
    group = path.name.split("_")[1]
    if group in (OF_EVERY_GROUP, OF_DECIDING_GROUPS):
        return group == OF_EVERY_GROUP or plugin.group in plugins.POLICY_GROUPS.values()
    return plugins.SHORT_GROUPS.get(group) == plugin.group
