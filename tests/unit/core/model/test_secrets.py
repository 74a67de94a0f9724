"""How jobs name secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec.specs import spec_from_wire, spec_to_wire
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.secrets import SecretUse, parse_use
from cotenant.core.model.validation import check_spec

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
uses = st.one_of(
    st.builds(SecretUse, names, variable=names),
    st.builds(SecretUse, names, path=st.lists(names, min_size=1, max_size=3).map("/".join)),
)


def wrong(*secrets: SecretUse, environment: tuple[tuple[str, str], ...] = ()) -> list[str]:
    spec = JobSpec(roles=(Role(),), command=("true",), secrets=secrets, environment=environment)
    return [one.field.removeprefix("spec.") for one in check_spec(spec) if "secrets" in one.field]


@given(uses)
def test_a_use_is_read_as_it_is_written_and_as_it_is_sent(use: SecretUse) -> None:
    assert parse_use(str(use)) == use
    assert spec_from_wire(spec_to_wire(JobSpec(roles=(Role(),), secrets=(use,)))).secrets == (use,)


@pytest.mark.parametrize("text", ["", "=A", ":a", "2A", "A=", "A:", "A:/", "A B", "A-B=C"])
def test_what_is_no_use_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be NAME, NAME=VARIABLE or NAME:PATH"):
        parse_use(text)


def test_every_bad_use_is_named() -> None:
    assert wrong(SecretUse("A", "A"), SecretUse("A", path="a/b"), SecretUse("B", path="c")) == []
    assert wrong(SecretUse("A", "A"), SecretUse("B", "A")) == ["secrets[1].variable"]
    assert wrong(SecretUse("A", "A"), environment=(("A", "x"),)) == ["secrets[0].variable"]
    assert wrong(SecretUse("A", "COTENANT_X"), SecretUse("A", "A", "a"), SecretUse("A")) == [
        "secrets[0].variable", "secrets[1]", "secrets[2]",
    ]  # fmt: skip
    assert wrong(*(SecretUse("A", path=path) for path in ("../a", "/a", "a//b", "a\n", "x/" * 9))) == [
        f"secrets[{place}].path" for place in range(5)
    ]
    assert wrong(SecretUse("A", path="a"), SecretUse("B", path="a/b"), SecretUse("B", path="a")) == [
        "secrets[1].path", "secrets[2].path", "secrets[2].path",
    ]  # fmt: skip
    assert wrong(*(SecretUse("A", f"V{place}") for place in range(33))) == ["secrets"]
