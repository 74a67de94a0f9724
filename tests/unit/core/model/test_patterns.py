"""Users' patterns: compiled within milliseconds whatever they contain, and matched in linear time."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.core.model import patterns
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.patterns import LENGTH_MAX, BadPattern, compile_pattern, find_error
from cotenant.core.model.validation import check_spec

COMPILE_SECONDS_MAX = 0.05


def nasty() -> Iterator[str]:
    """Yield patterns that take long to compile on one engine or another."""
    yield "(" + "(?:a{1,1000})" * 70 + ")"
    yield "((a{1,30}){1,30})" * 60
    yield "(" * 500 + ")" * 500
    yield "(" + "|".join([r"\pL+"] * 170) + ")"
    yield "(" + r"\pL{1000}" * 100 + ")"
    yield "(" + r"(?:\C*){100}" * 80 + ")"
    yield "(" + "[^\\x{1}-\\x{ffff}]" * 50 + ")"
    yield "(?i)(" + "[a-zµſK]{999}" * 60 + ")"
    yield "((((((((x{9}){9}){9}){9}){9}){9}){9}){9}"
    yield "(" + "x?" * 250 + "x" * 250 + ")"


def spec_of(regex: str) -> JobSpec:
    return JobSpec(command=("true",), roles=(Role(request=Request(1000)),), progress_regex=regex)


@pytest.mark.parametrize("pattern", list(nasty()), ids=lambda text: text[:16])
def test_no_pattern_takes_long_to_compile(pattern: str) -> None:
    begin = time.thread_time()
    find_error(pattern[:LENGTH_MAX])
    assert time.thread_time() - begin < COMPILE_SECONDS_MAX


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.sampled_from(["a", "(", ")", "(?:", "{1,1000}", "*", "?", "|", r"\pL", "[^x]", ".", "+?"]), max_size=200
    )
)
def test_nothing_made_of_what_patterns_are_made_of_takes_long(parts: list[str]) -> None:
    text = "".join(parts)[:LENGTH_MAX]
    begin = time.thread_time()
    wrong = find_error(text)
    assert time.thread_time() - begin < COMPILE_SECONDS_MAX
    assert wrong == "" or wrong[0].islower()


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (r"(\d+)(?= it)", "'(?=' is not supported; patterns have RE2's syntax"),
        (r"(?<!x)(\d+)", "is not supported"),
        (r"(a)\1", r"\1' is not supported"),
        (r"(a++)", "'++' is not supported"),
        ("step", "has no group for the step"),
        ("(", "is not a regular expression: missing )"),
        ("x" * 1025, "must have at most 1024 characters, not 1025"),
        ("(" + "a{1,1000}" * 50 + ")", "is too large once its repeats are expanded"),
        ("\ud800()", "characters that are not valid Unicode"),
    ],
)
def test_a_pattern_that_is_refused_is_refused_in_words(pattern: str, told: str) -> None:
    (violation,) = check_spec(spec_of(pattern))
    assert violation.field == "spec.progress.regex"
    assert told in violation.description


@pytest.mark.parametrize(
    "pattern", [r"step (\d+)", r"iter (\d+)/\d+ loss (?P<loss>[\d.]+)", r"(?i)epoch\s+(\d{1,9})", r"^\[(\d+)\]$", "()"]
)
def test_usual_patterns_are_taken(pattern: str) -> None:
    assert check_spec(spec_of(pattern)) == ()


def test_a_client_without_the_engine_leaves_the_check_to_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "re2":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert find_error("(") == ""


def test_a_compiled_pattern_knows_its_groups() -> None:
    compiled = compile_pattern(r"(?P<step>\d+) (?P<loss>\S+)")
    assert (compiled.groups, dict(compiled.groupindex)) == (2, {"step": 1, "loss": 2})
    with pytest.raises(BadPattern, match="must have at most 3"):
        compile_pattern("abcd", 3)
    assert patterns.MEMORY_BYTES_MAX <= 256 * 1024  # beyond it compiling takes seconds
