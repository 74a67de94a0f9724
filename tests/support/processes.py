"""Runs the tests of one pytest run in several processes, which are forked once all tests are collected.

Theory of operation. Collecting ten thousand tests takes as long as running a tenth of them, so it is done once: each
process is a copy of the one that collected, with all its modules. A process runs units of tests (`scheduler`) and sends
each report to the first process, which shows and counts it as if it had run the test itself. A process that crashes is
a failure of the test that it ran, and is replaced.

`--processes auto` switches it on. `PROCESS` tells a test which process it is in.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
from tests.support.durations import Durations
from tests.support.scheduler import CALM, Schedule, cores

PROCESS = "COTENANT_TEST_PROCESS"  # environment variable: number of the process, from 0
NEXT, ENDED, REPORT, WARNING = "next", "ended", "report", "warning"
ENDING_SECONDS = 10.0  # for processes of a run that is given up
FORK = get_context("fork")


def unit_of(item: pytest.Item) -> str:
    """Return the unit of a test: its group, else its file."""
    if item.get_closest_marker(CALM):
        return CALM
    group = item.get_closest_marker("group")
    return group.args[0] if group else file_of(item)


def file_of(item: pytest.Item) -> str:
    """Return the file of a test, as a path from the root of the repository."""
    return item.nodeid.partition("::")[0]


# The processes that run tests ----------------------------------------------------------------------------------------


class Sender:
    """A pytest plug-in of a process that runs tests: sends what it hears to the first process."""

    def __init__(self, config: pytest.Config, line: Connection) -> None:
        self._config, self._line = config, line

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._line.send((REPORT, data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        """Send a warning, as text: its classes may be those of a test."""
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        place = {"filename": warning_message.filename, "lineno": warning_message.lineno}
        self._line.send((WARNING, {"text": text, "place": place, "when": when, "nodeid": nodeid, "location": location}))


def run_tests(session: pytest.Session, line: Connection, number: int) -> None:
    """Run tests in this process, as long as the first process sends some."""
    os.environ[PROCESS] = str(number)
    config = session.config
    _capture_anew(config)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Sender(config, line), "sender")

    def more() -> list[int]:
        line.send((NEXT, None))
        tests: list[int] = line.recv()
        return tests

    with suppress(KeyboardInterrupt), _fixtures_torn_down(session):
        waiting = more()
        while waiting:
            test = waiting.pop(0)
            waiting = waiting or more()
            following = session.items[waiting[0]] if waiting else None
            config.hook.pytest_runtest_protocol(item=session.items[test], nextitem=following)
            line.send((ENDED, test))


@contextmanager
def _fixtures_torn_down(session: pytest.Session) -> Iterator[None]:
    """End the servers of fixtures, also if the run is given up: the first process sends SIGTERM then."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)  # pytest has no public way


def _capture_anew(config: pytest.Config) -> None:
    """Capture output into files of this process: those from before the fork have one position for all processes."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    manager.read_global_capture()
    manager.stop_global_capturing()
    manager.start_global_capturing()


# The first process ---------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Process:
    """A process, what it sends, and the reports of the test that it runs; `asks` if it waits for an answer."""

    number: int
    process: ForkProcess
    line: Connection
    asks: bool = False
    reports: list[pytest.TestReport] = field(default_factory=list)


class Pool:
    """The processes of a run."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        self._session, self._config = session, session.config
        units, files = [unit_of(item) for item in session.items], [file_of(item) for item in session.items]
        self._schedule = Schedule(units, files, Durations.read(), cores())
        self._running: dict[Connection, Process] = {}
        self._started = 0
        for _ in range(min(processes, len(set(units)))):
            self._start()

    def run(self) -> None:
        """Run all tests.

        Raises:
            pytest.Session.Failed: as many failed as `--maxfail` says; the processes have been killed.
        """
        try:
            while self._running:
                for line in connection.wait(list(self._running)):
                    self._receive(self._running[line])  # type: ignore[index]  # it waits for sockets too
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        finally:
            self._kill()

    def _start(self) -> None:
        ours, theirs = FORK.Pipe()
        run = partial(run_tests, self._session, theirs, self._started)
        process = FORK.Process(target=run, name=f"tests-{self._started}")
        self._running[ours] = Process(self._started, process, ours)
        self._schedule.start(self._started)
        self._started += 1
        process.start()
        theirs.close()

    def _receive(self, one: Process) -> None:
        try:
            kind, data = one.line.recv()
        except (EOFError, OSError):
            self._remove(one)
            return
        if kind == REPORT:
            one.reports.append(self._config.hook.pytest_report_from_serializable(config=self._config, data=data))
        elif kind == WARNING:
            self._warn(data)
        elif kind == ENDED:
            self._show(one.reports)
            self._schedule.ended(one.number, data)
        else:
            one.asks = True
            self._answer(one)

    def _answer(self, one: Process) -> None:
        tests = self._schedule.next(one.number)
        if tests is not None:
            one.asks = False
            one.line.send(tests)

    def _remove(self, one: Process) -> None:
        """Remove a process that has ended; if it had tests left, it crashed."""
        del self._running[one.line]
        one.process.join()
        crashed = self._schedule.remove(one.number)
        if crashed is not None:
            self._show([*one.reports, self._crash(self._session.items[crashed], one.process.exitcode)])
        if not self._schedule.is_empty and crashed is not None:
            self._start()
        for other in [other for other in self._running.values() if other.asks]:
            self._answer(other)

    def _crash(self, item: pytest.Item, status: int | None) -> pytest.TestReport:
        how = f"signal {-status}" if status and status < 0 else f"status {status}"
        why = f"the process that ran this test ended with {how}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")

    def _show(self, reports: list[pytest.TestReport]) -> None:
        """Show and count a test that has ended, as if this process had run it."""
        hook = self._config.hook
        hook.pytest_runtest_logstart(nodeid=reports[0].nodeid, location=reports[0].location)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=reports[0].nodeid, location=reports[0].location)
        reports.clear()

    def _warn(self, data: Mapping[str, Any]) -> None:
        message = warnings.WarningMessage(UserWarning(data["text"]), UserWarning, **data["place"])
        arguments = {"warning_message": message, **{name: data[name] for name in ("when", "nodeid", "location")}}
        self._config.hook.pytest_warning_recorded.call_historic(kwargs=arguments)

    def _kill(self) -> None:
        for one in self._running.values():
            one.process.terminate()
        for one in self._running.values():
            one.process.join(ENDING_SECONDS)
            one.process.kill()
