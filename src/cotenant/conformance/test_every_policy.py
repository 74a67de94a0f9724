"""Laws of every policy: how it is installed, what it imports, its options, and that it decides by its arguments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance import purity
from cotenant.conformance.cases import CASES, Case, answers, fresh, plain
from cotenant.conformance.trials import tried
from cotenant.core.policy import options as declared_options

FORBIDDEN = {
    *("asyncio", "concurrent", "datetime", "grpc", "multiprocessing", "os", "random", "secrets", "socket", "sqlite3"),
    *("structlog", "subprocess", "threading", "time", "uuid"),
}
WORLDS = 60


def test_an_installed_policy_implements_its_protocol(plugin: plugins.Plugin) -> None:
    """A policy loads, and has the name, the API version and the methods of its group."""
    assert plugin.healthy, plugin.error
    assert plugin.policy is not None
    assert (plugin.policy.name, plugin.policy.api_version) == (plugin.name, 1)  # type: ignore[attr-defined]  # asked here


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


# Options ------------------------------------------------------------------------------------------------------------


def test_options_round_trip(plugin: plugins.Plugin) -> None:
    """The docstring of `Options` has a line `NAME: what it is` for each option, and the defaults can be read back."""
    declared = getattr(plugin.policy, "Options", None)
    if declared is None:
        return
    told = inspect.getdoc(declared) or ""
    for field in dataclasses.fields(declared):
        assert re.search(rf"^{field.name}: \S", told, re.MULTILINE), f"{field.name} is not described"
    assert declared_options.parse(declared, plugin.options) == declared()


def test_an_unknown_option_is_named(plugin: plugins.Plugin) -> None:
    """An unknown option is refused by its name."""
    with pytest.raises(plugins.BadOption, match="no_such_option"):
        plugin.make({"no_such_option": "1"})


def numeric(plugin: plugins.Plugin) -> list[str]:
    """Return the names of the numeric options."""
    return [name for name, default in plugin.options.items() if re.fullmatch(r"[\d.,]+", default)]


def test_all_invalid_options_are_named_at_once(plugin: plugins.Plugin) -> None:
    """All options that are not numbers, where numbers are expected, are refused at once."""
    if numbers := numeric(plugin):
        with pytest.raises(plugins.BadOption) as caught:
            plugin.make(dict.fromkeys(numbers, "many"))
        assert {violation.field for violation in caught.value.violations} == set(numbers)


def test_a_number_out_of_range_is_named(plugin: plugins.Plugin) -> None:
    """A negative number or NaN as an option is refused by the option's name."""
    for name in numeric(plugin):
        for text in ("-1", "nan"):
            with pytest.raises(plugins.BadOption) as caught:
                plugin.make({name: text})
            named = [violation.field for violation in caught.value.violations]
            assert named == [name] or (plugin.group != "cotenant.queue_policies" and name in named)


NUMBER = r"(\d[\d.e+-]*)"
LEAST = rf"must be (?:{NUMBER} or more|from {NUMBER} to|(?:above|more than) {NUMBER})"
MOST = rf"(?:to|at most|below) {NUMBER}(?:,|$)"
HOW_TO_CHECK = (
    'yield Violation("{0}", f"must be more than 0, not {{self.{0}:g}}") in `Options.check` where it is too small; '
    'the message may also begin with "must be N or more" or "must be from N to M"'
)


def out_of_range(options: Any, name: str, value: float) -> str:
    """Return why an option cannot have a value, whatever the other options are; "" if it can."""
    changed = dataclasses.replace(options, **{name: value})
    told = [one.description for one in changed.check() if one.field == name]
    for other, figure in dataclasses.asdict(changed).items():
        told = [re.sub(rf"\b{other}\b", f"{figure:g}", text) if other in text else text for text in told]
    return next((text for text in told if re.search(LEAST, text)), "")


def may_be_infinite(plugin: plugins.Plugin, name: str) -> bool:
    """Return whether an option is described as one that may be infinite."""
    told = inspect.getdoc(plugin.policy.Options) or ""  # type: ignore[union-attr]  # it has options
    return bool(re.search(rf"^{name}: [^\n]*may be infinite", told, re.MULTILINE))


def test_every_numeric_option_is_checked(plugin: plugins.Plugin) -> None:
    """A policy with numeric options checks them: its `Options` have a method `check` that yields violations."""
    names = ", ".join(numeric(plugin))
    declared = getattr(plugin.policy, "Options", None)
    assert not names or callable(getattr(declared, "check", None)), (
        f"any number is accepted for {names}: {HOW_TO_CHECK.format(numeric(plugin)[0])}"
    )


def test_the_ends_of_an_options_range_are_those_that_its_violation_names(plugin: plugins.Plugin) -> None:
    """A numeric option has a range, whose ends are those that its violations name; it is finite unless it says so."""
    options = plugin.policy.Options() if numeric(plugin) else None  # type: ignore[union-attr]  # it has options
    for name in numeric(plugin):
        kind = type(getattr(options, name))
        if kind is tuple:
            continue
        if kind is float:
            refused = bool(out_of_range(options, name, math.inf))
            assert refused != may_be_infinite(plugin, name), (
                f"infinity {'is refused' if refused else 'is accepted'} for {name}, and its description "
                f"{'says' if refused else 'does not say'} `may be infinite`"
            )
        for pattern, outwards in ((LEAST, -math.inf), (MOST, math.inf)):
            if not (named := re.search(pattern, out_of_range(options, name, kind(math.copysign(1e12, outwards))))):
                assert outwards > 0, f"{name} has no least value: {HOW_TO_CHECK.format(name)}"
                continue
            end = kind(float(next(filter(None, named.groups()))))
            beyond, within = (
                math.nextafter(end, towards) if kind is float else end + int(math.copysign(1, towards))
                for towards in (outwards, -outwards)
            )
            is_outside = bool(re.match("must be (above|more)|below", named[0]))
            told = [bool(out_of_range(options, name, value)) for value in (beyond, end, within)]
            assert told == [True, is_outside, False], (name, end)


# Decisions ----------------------------------------------------------------------------------------------------------


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
