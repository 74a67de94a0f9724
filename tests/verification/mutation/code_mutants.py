"""Small errors to put into a module, one at a time: what a hurried author might have written instead.

Each is a replacement in the text of the module, so that its diff shows nothing else. Left out is what no test should
hold to anything: docstrings and messages, annotations, `assert`, what a logger is told, the arguments of decorators and
of dataclass fields, and the constants of a module, which are choices rather than laws.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatchmethod

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
OPPOSITES = {"min": "max", "any": "all", "minimum": "maximum", "argmin": "argmax", "floor": "ceil", "left": "right"}
OPPOSITES |= {there: here for here, there in OPPOSITES.items()}
SYMMETRIC = {
    "min",
    "max",
    "minimum",
    "maximum",
    "add",
    "multiply",
    "hypot",
    "isclose",
    "isinstance",
    "field",
    "range",
    "TypeVar",
    "NewType",
    "gcd",
}
LOGGERS = {"log", "logger", "logging", "warnings"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """An error in a module: the text from `start` to `end`, in bytes of UTF-8, replaced by another."""

    path: str
    start: int
    end: int
    text: str
    line: int

    def apply(self, source: str) -> str:
        """Return the module with the error."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        """Return what it changes, as a unified diff."""
        before, after = (text.splitlines(keepends=True) for text in (source, self.apply(source)))
        return "".join(difflib.unified_diff(before, after, self.path, self.path, n=2))


def mutants_of(source: str, path: str) -> list[Mutant]:
    """Return all mutants of a module, in the order of their places.

    >>> [mutant.text for mutant in mutants_of("def f(a, b):\\n    return a < b + 1", "f.py")]
    ['<=', '>=', '-', '2']
    """
    found = dict.fromkeys(_Finder(source, path).find(ast.parse(source)))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.text))


class _Finder:
    """Walks through a module, and yields the mutants of each node."""

    def __init__(self, source: str, path: str) -> None:
        self._data, self._path = source.encode(), path
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def find(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of a node and of its parts."""
        if not _is_left_out(node):
            yield from self._mutants(node)
            for child in _worth_mutating(node):
                yield from self.find(child)

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _replaced(self, node: ast.expr | ast.stmt, text: str) -> Mutant:
        return Mutant(self._path, self._start(node), self._end(node), text, node.lineno)

    def _between(self, left: ast.expr, right: ast.expr, operator: str, *others: str) -> Iterator[Mutant]:
        """Yield mutants with another operator between two operands; parentheses may stand there as well."""
        start, end = self._end(left), self._start(right)
        pattern = rb"\s+".join(map(re.escape, operator.encode().split()))
        if match := re.search(pattern, self._data[start:end]):
            line = left.lineno + self._data[self._start(left) : start + match.start()].count(b"\n")
            for other in others:
                yield Mutant(self._path, start + match.start(), start + match.end(), other, line)

    @singledispatchmethod
    def _mutants(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of a node itself."""
        yield from ()

    @_mutants.register
    def _(self, node: ast.Compare) -> Iterator[Mutant]:
        for left, kind, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            operator, others = COMPARISONS[type(kind)]
            yield from self._between(left, right, operator, *others)

    @_mutants.register
    def _(self, node: ast.BoolOp) -> Iterator[Mutant]:
        operator, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from self._between(left, right, operator, other)

    @_mutants.register
    def _(self, node: ast.BinOp) -> Iterator[Mutant]:
        if type(node.op) in ARITHMETIC and not (_is_text(node.left) or _is_text(node.right)):
            yield from self._between(node.left, node.right, *ARITHMETIC[type(node.op)])

    @_mutants.register
    def _(self, node: ast.AugAssign) -> Iterator[Mutant]:
        if type(node.op) in ARITHMETIC and not _is_text(node.value):
            operator, other = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, operator, other)
        yield self._replaced(node, "pass")

    @_mutants.register
    def _(self, node: ast.UnaryOp) -> Iterator[Mutant]:
        if isinstance(node.op, ast.UAdd):
            return
        operand = self._text(node.operand)
        simple = isinstance(node.operand, ast.Name | ast.Attribute | ast.Call | ast.Constant | ast.Subscript)
        yield self._replaced(node, operand if simple else f"({operand})")

    @_mutants.register
    def _(self, node: ast.Constant) -> Iterator[Mutant]:
        match node.value:
            case bool():
                yield self._replaced(node, str(not node.value))
            case int():
                yield self._replaced(node, str(node.value + 1))
            case float():
                yield self._replaced(node, str(2 * node.value or 1.0))

    @_mutants.register
    def _(self, node: ast.Call) -> Iterator[Mutant]:
        name = _last_name(node.func)
        if other := OPPOSITES.get(name):
            text = self._text(node.func)
            yield self._replaced(node.func, text[: len(text) - len(name)] + other)
        if name in SYMMETRIC or any(isinstance(one, ast.Starred) for one in node.args):
            return
        for left, right in zip(node.args, node.args[1:], strict=False):
            here, there = self._text(left), self._text(right)
            if here != there:
                between = self._data[self._end(left) : self._start(right)].decode()
                yield Mutant(self._path, self._start(left), self._end(right), f"{there}{between}{here}", left.lineno)

    @_mutants.register
    def _(self, node: ast.If) -> Iterator[Mutant]:
        yield from self._negated(node.test)

    @_mutants.register
    def _(self, node: ast.IfExp) -> Iterator[Mutant]:
        yield from self._negated(node.test)

    @_mutants.register
    def _(self, node: ast.comprehension) -> Iterator[Mutant]:
        for condition in node.ifs:
            yield from self._negated(condition)

    def _negated(self, test: ast.expr) -> Iterator[Mutant]:
        """Yield the negation of a condition that has no operator to change."""
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            yield self._replaced(test, f"not {self._text(test)}")

    @_mutants.register
    def _(self, node: ast.Expr) -> Iterator[Mutant]:
        if isinstance(node.value, ast.Call):
            yield self._replaced(node, "pass")

    @_mutants.register
    def _(self, node: ast.Assign) -> Iterator[Mutant]:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            yield self._replaced(node, "pass")

    @_mutants.register(ast.Raise)
    @_mutants.register(ast.Delete)
    def _(self, node: ast.stmt) -> Iterator[Mutant]:
        yield self._replaced(node, "pass")

    @_mutants.register
    def _(self, node: ast.Continue) -> Iterator[Mutant]:
        yield self._replaced(node, "break")

    @_mutants.register
    def _(self, node: ast.Break) -> Iterator[Mutant]:
        yield self._replaced(node, "continue")


def _last_name(function: ast.expr) -> str:
    """Return the name of what is called, without what it is an attribute of."""
    match function:
        case ast.Name():
            return function.id
        case ast.Attribute():
            return function.attr
    return ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_left_out(node: ast.AST) -> bool:
    """Return whether tests should hold no part of a node to anything."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=function) | ast.Expr(value=ast.Call(func=function)):
            return _last_name(function) == "field" or _is_logged(function)
    return False


def _worth_mutating(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node without those that tests should not hold to anything."""
    match node:
        case ast.Raise():
            return
        case ast.Module():
            yield from (one for one in node.body if not isinstance(one, ast.Assign | ast.AnnAssign))
            return
        case ast.Call(func=ast.Name(id="zip")):
            yield from node.args  # `strict` finds errors, and changes nothing where there are none
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (*node.args.defaults, *(one for one in node.args.kw_defaults if one), *node.body)
            return
        case ast.ClassDef():
            yield from node.body
            return
        case ast.AnnAssign():
            yield from filter(None, [node.value])
            return
    yield from ast.iter_child_nodes(node)


def _is_logged(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and _last_name(function.value) in LOGGERS
