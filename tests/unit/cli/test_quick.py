"""The parser of quick commands reads a line as typer does, or leaves it to typer."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin
from tools import quick_table

from cotenant.cli import quick
from cotenant.cli.aliases import ALIASES
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError
from cotenant.cli.quick_table import COMMANDS

NAMES = st.sampled_from(sorted(COMMANDS))
WORDS = st.sampled_from(["x", "a=b", "1", "0", "-1", "99999999999", "1.5", "", "-", "--", "é", "--json", "-f", "2GiB"])
FLAGS = sorted({flag for row in COMMANDS.values() for flag in row["options"]} | {"--phase", "--help", "--no-such"})
GLOBALS = ["--endpoint", "--state-dir", "--token"]
OPTIONS = st.sampled_from([*FLAGS, *GLOBALS])
ASSIGNED = st.builds("{}={}".format, OPTIONS, WORDS)
LINES = st.lists(st.one_of(WORDS, OPTIONS, ASSIGNED), max_size=6)


def plain(values: Any) -> dict[str, Any]:
    """Return the values of a call, with what its context tells the command."""
    context = values["context"]
    return {**values, "context": (Flags.of(context), context.meta.get("cotenant.tail"))}


def quickly(arguments: list[str]) -> dict[str, Any] | None:
    """Return the values with which a quick command is called; None where typer parses the line."""
    call = quick.quick_command(arguments, {})
    if call is None:
        return None
    with (
        quick_table.recorded(next(word for word in arguments if word in COMMANDS)),
        patch("cotenant.cli.jobs.quick_submit.submitted", return_value=False),
        pytest.raises(quick_table.Recorded) as recorded,
    ):
        call()
    return plain(recorded.value.given)


def test_aliases_of_quick_commands_are_read_quickly() -> None:
    for alias, name in ALIASES.items():
        assert (quick.quick_command([alias, "x"], {}) is None) == (quick.quick_command([name, "x"], {}) is None)
        if name not in COMMANDS:
            continue
        call = quick.quick_command([alias] if name == "jobs" else [alias, "x"], {})
        assert call is not None
        assert call.args[0] is COMMANDS[name]  # type: ignore[attr-defined]  # a partial


def test_the_table_is_up_to_date() -> None:
    assert quick_table.TABLE.read_text() == quick_table.table(), "run `make docs`"


@given(NAMES, LINES)
def test_what_is_read_quickly_is_what_typer_reads(name: str, arguments: list[str]) -> None:
    values = quickly([name, *arguments])
    if values is not None:
        assert values == plain(quick_table.typer_values(name, arguments))


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("jobs --all --limit 7 --label a=b --label c=d", {"everything": True, "limit": 7, "label": ["a=b", "c=d"]}),
        ("cancel a b --json", {"job_ids": ["a", "b"], "as_json": True}),
        ("logs -f --tail=4KiB a", {"job_id": "a", "following": True, "tail": "4KiB"}),
        ("--endpoint a:1 nodes", {"node_id": ""}),
    ],
)
def test_plain_lines_are_read_quickly(line: str, values: dict[str, Any]) -> None:
    read = quickly(line.split())
    assert read is not None
    assert values.items() <= read.items()


def test_the_words_after_the_dashes_are_the_job_s() -> None:
    read = quickly(["submit", "--gpus", "1", "--env", "A=b", "--", "run", "--gpus", "2"])
    assert read == plain(
        quick_table.typer_values("submit", ["--gpus", "1", "--env", "A=b", "--", "run", "--gpus", "2"])
    )
    assert read["context"][1] == ["run", "--gpus", "2"]


@pytest.mark.parametrize(
    "line",
    ["", "--help", "jobs --help", "jobs --nodde x", "jobs --limit 0", "jobs --limit x", "show", "show a b", "status x"],
)
def test_help_and_mistakes_are_typer_s(line: str) -> None:
    assert quick.quick_command(line.split(), {}) is None


def test_completion_is_typer_s() -> None:
    assert quick.quick_command(["jobs"], {"_COTENANT_COMPLETE": "complete_bash"}) is None


def test_typer_refuses_what_is_wrong() -> None:
    with pytest.raises(CommandError, match="no such option"):
        quick_table.typer_values("jobs", ["--nodde"])


LISTED = (
    ["submit", "--name", "one", "--gpus", "1", "--", "true"],
    ["submit", "--gpus", "9", "--", "true"],
    ["submit", "--gpus", "x", "--", "true"],
    ["submit", "--dry-run", "--", "true"],
    ["submit", "--after", "nothing", "--", "true"],
    ["jobs"],
    ["jobs", "--all", "--json"],
    ["show", "nothing"],
    ["explain", "nothing"],
    ["nodes"],
    ["nodes", "nothing"],
    ["cancel", "nothing"],
    ["status"],
    ["jobs", "--token", "wrong"],
    ["nodes", "--endpoint", "127.0.0.1:1"],
)


@pytest.mark.parametrize("line", LISTED, ids=" ".join)
def test_output_errors_and_exit_codes_are_those_of_grpc(
    shell: Shell, standin: Standin, monkeypatch: pytest.MonkeyPatch, line: list[str]
) -> None:
    quickly_ended = shell(*line)
    monkeypatch.setattr(quick, "COMMANDS", {})
    monkeypatch.setattr("cotenant.cli.connection._is_one", lambda endpoint: False)
    by_grpc = shell(*line)
    if line[0] == "submit" and not quickly_ended.code and "--dry-run" not in line:
        first, second = quickly_ended.out.strip(), by_grpc.out.strip()  # each submission has its own id
        assert first != second
        assert (first, second) < ("~", "~")
        return
    assert quickly_ended == by_grpc
