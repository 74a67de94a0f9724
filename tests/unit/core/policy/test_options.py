from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.validation import Violation
from cotenant.core.policy import options
from cotenant.core.policy.options import BadOption, InvalidOptionsClass


class Mode(StrEnum):
    STRICT = "strict"
    BACKFILL = "back-fill"


@dataclass(frozen=True, slots=True)
class Everything:
    count: int = 3
    share: float = 0.5
    active: bool = True
    label: str = "x"
    thresholds: tuple[float, ...] = (3250.0, 7200.0)
    names: tuple[str, ...] = ()
    mode: Mode = Mode.STRICT
    size: Literal["small", "large"] = "small"
    limit: float | None = None
    seeds: tuple[int, ...] = field(default_factory=lambda: (1, 2))


@dataclass(frozen=True)
class Between:
    low: float = 0.0
    high: float = 1.0

    def check(self) -> Iterator[Violation]:
        if self.low >= self.high:
            yield Violation("low", f"must be below high, which is {self.high:g}")


words = st.text(st.characters(categories=["L", "N"]), min_size=1)
numbers = st.floats(allow_nan=False)
everything = st.builds(
    Everything,
    count=st.integers(),
    share=numbers,
    active=st.booleans(),
    label=words,
    thresholds=st.lists(numbers).map(tuple),
    names=st.lists(words).map(tuple),
    mode=st.sampled_from(Mode),
    size=st.sampled_from(["small", "large"]),
    limit=st.none() | numbers,
    seeds=st.lists(st.integers()).map(tuple),
)


@given(everything)
def test_written_values_round_trip(value: Everything) -> None:
    texts = {name: options.written(getattr(value, name)) for name in Everything.__slots__}
    assert options.parse(Everything, texts) == value


def test_nothing_given_means_the_defaults() -> None:
    assert options.parse(Everything, {}) == Everything()


def test_defaults_are_shown_as_they_would_be_given() -> None:
    assert options.defaults(Everything) == {
        "count": "3",
        "share": "0.5",
        "active": "true",
        "label": "x",
        "thresholds": "3250,7200",
        "names": "",
        "mode": "strict",
        "size": "small",
        "limit": "none",
        "seeds": "1,2",
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("active", "Off", False),
        ("active", "1", True),
        ("share", " 2 ", 2.0),
        ("share", "inf", float("inf")),
        ("thresholds", "1, 2", (1.0, 2.0)),
        ("limit", "None", None),
        ("mode", "back-fill", Mode.BACKFILL),
    ],
)
def test_texts_may_be_written_as_people_do(name: str, text: str, value: Any) -> None:
    assert getattr(options.parse(Everything, {name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "description"),
    [
        ("count", "2.5", "must be a whole number, not '2.5'"),
        ("share", "much", "must be a number, not 'much'"),
        ("share", "nan", "must be a number, not nan"),
        ("active", "perhaps", "must be true or false, not 'perhaps'"),
        ("thresholds", "1,,2", "must be a number, not ''"),
        ("mode", "lazy", "must be one of strict, back-fill, not 'lazy'"),
        ("size", "Small", "must be one of small, large, not 'Small'"),
        ("limit", "", "must be a number, not ''"),
        ("cuont", "1", "is not an option; did you mean count?"),
        ("zzz", "1", "is not an option"),
    ],
)
def test_a_text_that_cannot_be_read_is_named(name: str, text: str, description: str) -> None:
    with pytest.raises(BadOption) as bad:
        options.parse(Everything, {name: text})
    assert bad.value.violations == (Violation(name, description),)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(BadOption) as bad:
        options.parse(Everything, {"count": "x", "share": "y", "other": "z"})
    assert [one.field for one in bad.value.violations] == ["count", "share", "other"]


def test_options_judge_their_values_together() -> None:
    assert options.parse(Between, {"low": "0.5"}) == Between(0.5, 1.0)
    with pytest.raises(BadOption, match=r"low: must be below high, which is 1 \(.*: low=0, high=1"):
        options.parse(Between, {"low": "2"})


def test_a_constructor_may_refuse_too() -> None:
    @dataclass(frozen=True)
    class Positive:
        count: int = 1

        def __post_init__(self) -> None:
            if self.count < 1:
                raise ValueError("count must be positive")

    with pytest.raises(BadOption, match="count must be positive"):
        options.parse(Positive, {"count": "0"})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (int, "int is no dataclass"),
        (make_dataclass("Thawed", [("a", int, 1)]), "Thawed is not frozen"),
        (make_dataclass("Required", [("a", int)], frozen=True), "option a has no default"),
        (make_dataclass("Unknown", [("a", "Nowhere", 1)], frozen=True), "a type in Unknown is not known"),
        (make_dataclass("Strange", [("a", dict, None)], frozen=True), "option a has a type that cannot be read"),
        (make_dataclass("Pair", [("a", tuple[int, int], (1, 2))], frozen=True), "cannot be read"),
        (make_dataclass("Either", [("a", int | str, 1)], frozen=True), "option a has a type that cannot be read"),
        (make_dataclass("Three", [("a", int | str | None, 1)], frozen=True), "option a has a type that cannot be read"),
        (make_dataclass("Words", [("a", dict[str, Literal["x"]], None)], frozen=True), "cannot be read"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_a_mistake_of_its_author(declared: type, message: str) -> None:
    with pytest.raises(InvalidOptionsClass, match=message):
        options.defaults(declared)
