"""What is mutated, what is not, and that every mutant is a module that differs in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.verification.mutation.code_mutants import mutants_of

MODULES = [
    pytest.param("src/cotenant/core/capacity/ledger.py", marks=pytest.mark.deep),
    "src/cotenant/core/scheduling/preemption.py",
    "policies/las.py",
    "policies/multi_array/split.py",
]


def mutated(source: str) -> list[str]:
    return [mutant.apply(source) for mutant in mutants_of(source, "a.py")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a == b != c", ["a != b != c", "a == b == c"]),
        ("a is  not b", ["a is b"]),
        ("(a) not in (b)", ["(a) in (b)"]),
        ("a and b or c", ["a or b or c", "a and b and c"]),
        ("(a + b) * c", ["(a - b) * c", "(a + b) / c"]),
        ("a ** b // c", ["a * b // c", "a ** b * c"]),
        ("a & ~b", ["a | ~b", "a & b"]),
        ("not (a == b)", ["(a == b)", "not (a != b)"]),
        ("a[::-1]", ["a[::1]", "a[::-2]"]),
        (
            "return True, 0, 2.5, 0.0",
            [
                f"return {rest}"
                for rest in ("False, 0, 2.5, 0.0", "True, 1, 2.5, 0.0", "True, 0, 5.0, 0.0", "True, 0, 2.5, 1.0")
            ],
        ),
        ("f(a, b)", ["f(b, a)", "pass"]),
        ("return min(a, b)", ["return max(a, b)"]),
        ("return np.any(a)", ["return np.all(a)"]),
        ("return [a for a in b if a.c]", ["return [a for a in b if not a.c]"]),
        ("return f(a) if b else c", ["return f(a) if not b else c"]),
        ("def f():\n    a.b = c", ["def f():\n    pass"]),
        ("a -= b", ["pass", "a += b"]),
        ("raise E(a, 1)", ["pass"]),
        ("for x in y:\n    break", ["for x in y:\n    continue"]),
        ("'ü'; f('ü', 'é')", ["'ü'; f('é', 'ü')", "'ü'; pass"]),
    ],
)
def test_an_expression_or_a_statement_is_changed_in_one_place(source: str, expected: list[str]) -> None:
    assert sorted(mutated(source)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "assert a < 1",
        "log.info('done', count=a + 1)",
        "@dataclass(frozen=True)\nclass A:\n    b: Literal[1]",
        "class A:\n    b: int = field(default=1, init=False)",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "x = f'{a + 1}' + 'b'",
        "return_ = f(+a)",
        "x = zip(a, strict=True)",
        "if TYPE_CHECKING:\n    x = f(1)",
        "WAIT_SECONDS: float = 60 * 60",
    ],
)
def test_what_no_test_should_hold_to_anything_stays(source: str) -> None:
    assert mutated(source) == []


def test_the_diff_shows_only_the_change() -> None:
    source = "def f(a):\n    # first\n    b = a + 1  # more\n    return b\n"
    (plus, one) = mutants_of(source, "a.py")
    assert (plus.line, one.line) == (3, 3)
    changed = [line for line in plus.diff(source).splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == ["-    b = a + 1  # more", "+    b = a - 1  # more"]


@pytest.mark.parametrize("path", MODULES)
def test_every_mutant_of_a_module_of_ours_can_be_compiled_and_is_another_program(path: str) -> None:
    source = (ROOT / Path(path)).read_text()
    plain, seen = ast.dump(ast.parse(source)), set[str]()
    for mutant in mutants_of(source, path):
        text = mutant.apply(source)
        compile(text, path, "exec")
        assert ast.dump(ast.parse(text)) != plain, mutant.diff(source)
        assert text not in seen, mutant.diff(source)
        seen.add(text)
