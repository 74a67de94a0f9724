"""Laws of every plug-in: how it is installed, and its options."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from typing import Any

import pytest

from cotenant import plugins
from cotenant.core.policy import options as declared_options


def test_an_installed_policy_implements_its_protocol(plugin: plugins.Plugin) -> None:
    """A policy loads, and has the name, the API version and the methods of its group."""
    assert plugin.healthy, plugin.error
    assert plugin.policy is not None
    assert (plugin.policy.name, plugin.policy.api_version) == (plugin.name, 1)  # type: ignore[attr-defined]  # asked here


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
