"""Rules of this repository that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from tests.support.paths import ROOT
from tools.methods import methods

from cotenant import plugins

FUNCTION_LINES_MAX = 60  # a screen, without signature and docstring
FILE_BYTES_MAX = 300_000
FRAGMENT_CHARACTERS_MAX = 400

# Mutating calls without a request_id, each with the reason.
REPEATABLE = {
    "AdviceService.PlanJobs": "it changes nothing; a plan is made again",
    "ObservationService.Observe": "a repeated observation is recognized by its time",
    "PlacementService.StopAttempts": "stopping twice has no further effect",
    "PlacementService.ResizeReplicas": "an attempt is stopped once, and only if it still runs",
    "PlacementService.AdviseAttempts": "advice is a statement of facts; a repeated profile request starts over",
    "PlacementService.ForgetAttempts": "forgetting twice has no further effect",
    "AgentService.Connect": "a stream; reports and acknowledgements name their attempt",
    "AgentService.UploadOutput": "a stream of one attempt's output, answered to one reader",
    "FolderService.FindMissingChunks": "it only reads, but for when chunks were last used",
    "FolderService.WriteChunks": "a chunk is known by its content and written once",
    "FolderService.CommitFolder": "a folder is known by its content",
    "AgentService.ServeSession": "a stream of one session, answered to one caller",
    "JobService.OpenSession": "a stream; a command is not run again for a caller who is gone",
    "PlacementService.OpenAttemptSession": "the same, relayed",
    "ScheduleService.PauseSchedule": "it asks for a state that may already hold",
    "ScheduleService.ResumeSchedule": "it asks for a state that may already hold",
    "ScheduleService.DeleteSchedule": "a repeat finds nothing, and says so; clients do not repeat it",
    "SecretService.SetSecret": "a repeat sets the same value",
    "SecretService.DeleteSecret": "a repeat finds nothing, and says so; clients do not repeat it",
    "SampleService.StreamSamples": "a stream; a repeated sample is recognized by its time",
}
READING = ("Get", "List", "Summarize", "Watch", "Read", "Explain", "Forecast", "Simulate", "Estimate", "PlanProfile")


def _files(*endings: str) -> list[Path]:
    """Return the tracked files, and untracked files that git does not ignore."""
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in done.stdout.split("\0") if name.endswith(endings or ""))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def _found(pattern: re.Pattern[str], paths: Iterable[Path]) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield what a pattern finds within lines, with its file and line number."""
    for path in paths:
        text = _text(path)
        for found in pattern.finditer(text):
            yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.end()) + 1}", found


@cache
def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def _line(found: re.Match[str]) -> str:
    """Return the line in which something was found."""
    return found.string[found.string.rfind("\n", 0, found.end()) + 1 :].partition("\n")[0].strip()


def test_a_function_fits_on_a_screen() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}": length
        for path in _files(".py")
        for function in _functions(ast.parse(_text(path)))
        if (length := _length(function)) > FUNCTION_LINES_MAX
    }
    assert long == {}


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions among the statements of a node; expressions have none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, ())
        for statement in inner if isinstance(inner, list) else ():
            yield from _functions(statement)


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False) or ""
    return (function.end_lineno or function.lineno) - function.body[0].lineno + 1 - len(docstring.splitlines())


OUR_POLICIES = [plugin for plugin in plugins.discover() if plugin.package == "cotenant" and plugin.policy]


@pytest.mark.parametrize("plugin", OUR_POLICIES, ids=lambda plugin: plugin.name)
def test_a_policy_has_a_doctest_and_names_its_source(plugin: plugins.Plugin) -> None:
    if plugin.group == "cotenant.runtimes":
        pytest.skip("a runtime makes no decisions")
    text = f"{import_module(plugin.policy.__module__).__doc__}\n{plugin.policy.__doc__}"
    assert ">>>" in text
    assert re.search(r"\b(19|20)\d\d\b|\[[PCRD]\]|baseline", text), (
        "names neither a paper, nor a source code, nor `baseline`"
    )


EXCUSES = re.compile(r"# *(type: *ignore|noqa)(?P<codes>\[[\w\-, ]+\]|: *[A-Z]+\d+(, *[A-Z]+\d+)*)?(?P<why>.*)")


def test_each_suppressed_check_names_the_rule_and_the_reason() -> None:
    bare = [
        f"{place}: {_line(excuse)}"
        for place, excuse in _found(EXCUSES, _files(".py"))
        if not (excuse["codes"] and re.search(r"[a-z]{3}", excuse["why"]))
    ]
    assert bare == []


def test_mutating_calls_are_idempotent() -> None:
    without_request_id = [
        f"{service.name}.{method.name}"
        for service in _services()
        for method in service.methods
        if not method.name.startswith(READING)
        and f"{service.name}.{method.name}" not in REPEATABLE
        and "request_id" not in method.input_type.fields_by_name
    ]
    assert without_request_id == []


SHARED_FOLDER = re.compile(r"""gettempdir\(\)(?!  # only read)|["'=\s](/tmp|/var/tmp|/dev/shm)\b""")


def test_no_predictable_file_name_in_a_shared_directory() -> None:
    """`tempfile` creates random names that we own; a fixed name in a shared directory may be another user's symlink."""
    shipped = [path for path in _files(".py", ".sh", ".toml", ".service", "Makefile") if not _is_test(path)]
    assert [f"{place}: {_line(name)}" for place, name in _found(SHARED_FOLDER, shipped)] == []


def _is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


def test_the_repeatable_calls_exist() -> None:
    calls = {f"{service.name}.{method.name}" for service in _services() for method in service.methods}
    assert set(REPEATABLE) - calls == set()


def _services() -> Iterator[ServiceDescriptor]:
    yield from {method.containing_service.full_name: method.containing_service for _, method in methods()}.values()


def test_no_file_mentions_a_home_directory() -> None:
    home = re.compile(r"(?<![\w.$}])/(home|Users|root|work)/\w")
    assert [place for place, _ in _found(home, _files())] == []


def test_no_file_has_unfinished_work_markers() -> None:
    later = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
    assert [place for place, _ in _found(later, _files(".py", ".proto", ".md", ".toml"))] == []


def test_no_file_is_too_large_for_review() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in _files()}
    assert {name: size for name, size in sizes.items() if size > FILE_BYTES_MAX} == {}


def test_changelog_fragments_are_sentences_under_a_known_heading() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    kinds = {kind["directory"] for kind in config["type"]}
    bad = []
    folders = [ROOT / config["directory"] / section["path"] for section in config["section"]]
    for path in (ROOT / config["directory"]).rglob("*"):
        if path.is_dir() or path.name in ("README.md", ".gitignore"):
            continue
        name, _, kind = path.name.removesuffix(".md").rpartition(".")
        text = path.read_text().strip()
        is_gathered = path.parent in folders and name and path.suffix == ".md" and kind in kinds
        begins_well = text[:1].isupper() or text[:1] == "`"
        if not (is_gathered and begins_well and text.endswith(".")):
            bad.append(path.name)
        elif len(text) > FRAGMENT_CHARACTERS_MAX:
            bad.append(f"{path.name} is too long")
    assert bad == []
