"""Laws of every policy that decides: what it imports, and that it decides by its arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance import purity
from cotenant.conformance.cases import CASES, Case, answers, fresh, plain
from cotenant.conformance.trials import tried

FORBIDDEN = {
    *("asyncio", "concurrent", "datetime", "grpc", "multiprocessing", "os", "random", "secrets", "socket", "sqlite3"),
    *("structlog", "subprocess", "threading", "time", "uuid"),
}
WORLDS = 60


def test_a_policy_imports_no_clock_no_randomness_and_no_io(plugin: plugins.Plugin) -> None:
    """A policy's module imports no clock, no randomness and no IO, and of Cotenant only the core and its policies."""
    assert plugin.policy is not None
    is_ours = plugin.package == plugins.OURS
    tree = ast.parse(Path(inspect.getfile(plugin.policy)).read_text(encoding="utf-8"))
    names = set(imported(tree, may_be_relative=not is_ours))
    assert not {name.split(".")[0] for name in names} & FORBIDDEN, "time and chance come in as arguments"
    assert all(name.startswith(("cotenant.core", "cotenant.policies")) for name in names if name.startswith("cotenant"))
    drawn = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random"
    ]
    assert {node.attr for node in drawn} <= {"Generator"}, "chance comes in as an argument"


def imported(tree: ast.Module, *, may_be_relative: bool) -> Iterable[str]:
    """Yield the modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or may_be_relative
            yield "." * node.level + (node.module or "")


def case_of(plugin: plugins.Plugin) -> st.SearchStrategy[Case]:
    """Return what may be asked of a policy."""
    return CASES[plugin.group]


def unwatched(plugin: plugins.Plugin, case: Case, of: Callable[[purity.Watch], purity.Replacements]) -> list[str]:
    """Return the functions that a policy calls of those that are watched."""
    watch = purity.Watch()
    policy = plugin.make()
    with purity.watched(type(policy), of(watch), watch):
        try:
            answers(policy, case)
        except purity.Impure:
            pass
        except Exception:  # a policy may fail because a watched function did not answer it
            if not watch.used:
                raise
    return watch.used


@tried(WORLDS)
@given(st.data())
def test_a_legal_world_raises_nothing(plugin: plugins.Plugin, data: st.DataObject) -> None:
    """A policy raises no error in a legal world."""
    answers(plugin.make(), data.draw(case_of(plugin)))


@tried(WORLDS)
@given(st.data())
def test_the_same_inputs_get_the_same_answers(plugin: plugins.Plugin, data: st.DataObject) -> None:
    """A policy is deterministic: the same inputs get the same answers."""
    case = data.draw(case_of(plugin))
    first, again = answers(plugin.make(), case), answers(plugin.make(), case)
    assert again == first


@tried(WORLDS)
@given(st.data())
def test_no_clock_is_read(plugin: plugins.Plugin, data: st.DataObject) -> None:
    """A policy reads no clock and does not wait: the present time is an argument."""
    used = unwatched(plugin, data.draw(case_of(plugin)), purity.clocks)
    assert not used, f"it called {', '.join(dict.fromkeys(used))}"


@tried(WORLDS)
@given(st.data())
def test_no_chance_of_its_own_is_drawn(plugin: plugins.Plugin, data: st.DataObject) -> None:
    """A policy draws no chance of its own: what may be random comes from the generator that it is given."""
    used = unwatched(plugin, data.draw(case_of(plugin)), purity.chance)
    assert not used, f"it called {', '.join(dict.fromkeys(used))}"


@tried(WORLDS)
@given(st.data())
def test_arguments_are_left_unchanged(plugin: plugins.Plugin, data: st.DataObject) -> None:
    """A policy leaves its arguments unchanged."""
    policy = plugin.make()
    for method, arguments in data.draw(case_of(plugin)).calls(policy):
        given_now = fresh(arguments)
        before = plain(given_now)
        getattr(policy, method)(*given_now)
        assert plain(given_now) == before, f"{method}() changed them"
