"""Files of environment variables: what a line means, and which lines are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.jobs.env_file import BYTES_MAX, parse_dotenv
from cotenant.cli.outcome import ExitCode
from cotenant.client.job_fields import draft_of

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)


def values_of(text: str) -> dict[str, str]:
    variables, mistakes = parse_dotenv(text)
    assert not mistakes
    return {one.name: one.value for one in variables}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=b", "b"),
        ("  export\tA = b \t", "b"),
        ("A=", ""),
        ("A= # nothing", ""),
        ("A=b#c # d", "b#c"),
        ("A=b c=d", "b c=d"),
        ("A=$HOME/x ${B}", "$HOME/x ${B}"),
        ("A='b # c'  # d", "b # c"),
        (r"A='b\n'", r"b\n"),
        (r'A="b\n\t\"c\"\\ \$x \q"', 'b\n\t"c"\\ $x \\q'),
        ('A="b\n# c"', "b\n# c"),
        ("A='b\nc'\n# d", "b\nc"),
        ("A=b\r\n", "b"),
        ('A=b"c"', 'b"c"'),
        ("exportA=1\nA=2", "2"),
        ("A=1\nA=2", "2"),
    ],
)
def test_what_a_line_means(line: str, value: str) -> None:
    assert values_of(line)["A"] == value


@given(st.dictionaries(NAMES, st.text(st.characters(exclude_characters="'\r", exclude_categories=["Cs"]))))
def test_any_value_comes_back_from_single_quotes(values: dict[str, str]) -> None:
    text = "\n\n# next\n".join(f"{name}='{value}' # end" for name, value in values.items())
    assert values_of(text) == values


@given(st.text(st.sampled_from("A='\"\\#\n\r $x")))
def test_every_line_is_a_variable_a_mistake_or_nothing(text: str) -> None:
    variables, mistakes = parse_dotenv(text)
    lines = text.replace("\r\n", "\n").count("\n") + 1
    numbers = [*(one.line for one in variables), *(line for line, _ in mistakes)]
    assert len(set(numbers)) == len(numbers)
    assert all(1 <= number <= lines for number in numbers)


def test_every_bad_line_is_named_without_its_value(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "prod.env"
    file.write_text('A=1\nhunter2\n2B=hunter2\nC=\'hunter2\nD="x" hunter2\nCOTENANT_X=1\nE="a\nb"\nF\n')
    told = shell("submit", "--env-file", str(file), "--", "true")
    assert told.code == ExitCode.USAGE
    assert told.err.count("error:") == 1
    for line, words in [
        (2, "no `=`"),
        (3, "a name has"),
        (4, "C: the quote ' is not"),
        (5, "D: text after"),
        (9, "no"),
    ]:
        assert f"{file}:{line}: {words}" in told.err
    assert "hunter2" not in told.err
    file.write_text("A=1\n\nCOTENANT_X=hunter2\n")
    told = shell("submit", "--env-file", str(file), "--", "true")
    assert f"{file}:3: env.COTENANT_X: this variable is set by the node agent" in told.err
    assert "hunter2" not in told.err


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: no such file"), (b"A=1\nB=\xff", ":2: not UTF-8"), (b"#" * (BYTES_MAX + 1), "1 MiB")],
    ids=["missing", "bytes", "large"],
)
def test_a_file_that_cannot_be_used_is_named(shell: Shell, tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "a.env"
    if content is not None:
        file.write_bytes(content)
    told = shell("submit", "--env-file", str(file), "--", "true")
    assert (told.code, str(file) in told.err, words in told.err) == (ExitCode.USAGE, True, True), told.err


def test_options_win_over_job_files_and_env_over_files(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    for name, text in {"a": "A=a\nB=a\nC=a\nD=a", "b": "B=b\nC=b\nD=b", "c": "C=c\nD=c"}.items():
        (tmp_path / f"{name}.env").write_text(text)
    job = tmp_path / "job.yaml"
    files = f"env_file: [{tmp_path}/a.env, {tmp_path}/b.env]"
    job.write_text(f"{files}\nenv: {{B: job, X: job, D: job}}\ncommand: ['true']\n")
    told = shell("submit", str(job), "--env-file", str(tmp_path / "c.env"), "--env", "D=option")
    assert told.code == ExitCode.DONE, told.err
    [made] = standin.jobs.jobs.values()
    assert dict(made.spec.environment) == {"A": "a", "B": "job", "C": "c", "D": "option", "X": "job"}
    written = shell("show", "--file", made.id).out
    assert "env_file" not in written
    job.write_text(f"env_file: {tmp_path}/none.env\nenv: [A]\ngpuz: 1\ncommand: ['true']\n")
    wrong = shell("submit", str(job))
    assert (wrong.code, wrong.err.count("job.yaml:")) == (ExitCode.USAGE, 3), wrong.err


def test_python_programs_name_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("A=a\nB=a")
    draft = draft_of(["true"], {"env_file": tmp_path / "a.env", "env": {"B": "own"}})
    assert draft.spec.environment == (("A", "a"), ("B", "own"))
