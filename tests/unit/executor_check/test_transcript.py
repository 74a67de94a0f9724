"""The transcript: the example and our own agent keep all laws; executors that do not are told which, and how."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cotenant.executor_check.laws import LAWS, law_in_words
from cotenant.executor_check.transcript import Finding, check

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "executor.py"
COTENANT = str(Path(sys.executable).with_name("cotenant"))
AGENT = (COTENANT, "serve", "agent", "--endpoints", "{endpoint}", "--node", "own")


def broken(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.fault for finding in findings if not finding.holds}


async def test_the_example_keeps_all_laws(tmp_path: Path) -> None:
    findings = await check([sys.executable, str(EXAMPLE), "node", str(tmp_path / "memory.json")])
    assert broken(findings) == {}
    assert [finding.name for finding in findings] == [law.__name__ for law in LAWS]


async def test_our_own_agent_keeps_all_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COTENANT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COTENANT_SHARE_MACHINE", "1")
    assert broken(await check([*AGENT, "--gpus", "fake:1", "--address", "127.0.0.1"], seconds_max=30.0)) == {}


FAULTS = {
    "ignores_a_repeated_assignment": ("elif attempt in self.reports:", "elif False:"),
    "reports_exit_codes": ("FAILED if code else SUCCEEDED, code)", "SUCCEEDED, 0)"),
    "ignores_older_epochs": ("elif report.state == RUNNING and order.epoch >= report.epoch:", "elif True:"),
    "ignores_a_deposed_leader": ("return False  # a deposed leader", "pass"),
    "answers_a_stop_of_what_it_lacks": ('self.report(order, STOPPED, message="unknown on this node")', "pass"),
}


async def test_each_broken_law_is_named_with_what_was_exchanged(tmp_path: Path) -> None:
    """One executor with several faults: laws that do not depend on these hold."""
    text = EXAMPLE.read_text()
    for name, (right, wrong) in FAULTS.items():
        if name == "ignores_a_repeated_assignment":
            text = text.replace('elif attempt in self.known["groups"]:', "elif False:")
        assert right in text
        text = text.replace(right, wrong)
    faulty = tmp_path / "faulty.py"
    faulty.write_text(text)
    findings = await check([sys.executable, str(faulty), "node", str(tmp_path / "memory.json")], seconds_max=2.0)
    faults = broken(findings)
    assert set(FAULTS) <= set(faults)
    assert not {"registers", "keeps_contact", "runs_an_assignment", "ignores_unknown_fields"} & set(faults)
    assert "was started 4 times, not once" in faults["ignores_a_repeated_assignment"]
    assert "exits with 3 was reported as SUCCEEDED with code 0" in faults["reports_exit_codes"]
    exchanged = next(finding.exchanged for finding in findings if finding.name == "reports_exit_codes")
    assert any(line.startswith("sent on stream 1: {'assignments'") for line in exchanged)
    assert any("ATTEMPT_STATE_SUCCEEDED" in line for line in exchanged)


async def test_an_executor_that_never_says_hello_breaks_the_first_law_with_what_it_printed() -> None:
    command = [sys.executable, "-c", "print('no node id given'); raise SystemExit(4)"]
    [finding] = await check(command, seconds_max=1.0)
    assert "expected a new stream that begins with a hello" in finding.fault
    assert "the executor exited with 4, and printed:\nno node id given" in finding.fault


async def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match="No such file"):
        await check(["/nonexistent/executor"])


def test_each_law_is_a_sentence() -> None:
    assert all(law_in_words(law).endswith(".") for law in LAWS)
