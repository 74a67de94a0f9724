"""Runs the transcript: starts the executor against a scripted placement, and holds it to one law after the other."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cotenant.executor_check import laws
from cotenant.executor_check.executor_process import ExecutorProcess
from cotenant.executor_check.scripted_placement import ScriptedPlacement

SECONDS_MAX = 15.0  # for anything that must come
LOG_LINES = 15
LAW_COUNT = len(laws.LAWS)


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a law holds: `fault` is empty if it does. `exchanged` is what was sent and received under the law."""

    name: str
    law: str
    fault: str = ""
    exchanged: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether it holds."""
        return not self.fault


async def check(
    command: Sequence[str],
    *,
    seconds_max: float = SECONDS_MAX,
    told: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Return which laws an executor keeps; `told` receives each finding at once.

    The command gets the address as COTENANT_ENDPOINT, and in its words for `{endpoint}`. Without a first hello, the
    other laws are not tried.

    Raises:
        OSError: the command cannot be executed.
    """
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="executor-check-") as folder:
        placement = ScriptedPlacement()
        process = ExecutorProcess(command, f"127.0.0.1:{await placement.start()}", Path(folder) / "log")
        script = laws.Script(placement, process, Path(folder), seconds_max)
        try:
            await process.start()
            for law in laws.LAWS:
                placement.lines.clear()
                finding = Finding(law.__name__, laws.law_in_words(law), await _fault(law, script), ())
                if not finding.holds:
                    finding = Finding(finding.name, finding.law, finding.fault, tuple(placement.lines))
                findings.append(finding)
                told(finding)
                if law is laws.registers and not finding.holds:
                    break
        finally:
            await process.stop()
            await placement.stop()
            for pid in laws.leftovers(Path(folder)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return findings


async def _fault(law: Callable[[laws.Script], object], script: laws.Script) -> str:
    """Return how a law is broken; empty if it is not."""
    try:
        await law(script)  # type: ignore[misc]  # a coroutine
    except laws.Broken as error:
        return f"{error}{_end(script.process)}"
    except (KeyError, AssertionError):
        return "what an earlier law was to bring about is not there"
    return ""


def _end(process: ExecutorProcess) -> str:
    """Return that the executor has ended by itself, with the end of what it printed."""
    if process.exited is None:
        return ""
    printed = process.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"; the executor exited with {process.exited}, and printed:", *printed])
