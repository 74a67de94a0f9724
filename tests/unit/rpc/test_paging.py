from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec.errors import Problem
from cotenant.rpc.paging import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX, page_of

ids = st.lists(st.text(max_size=4), unique=True).map(sorted)


def pages(listed: list[str], size: int, *, descending: bool = False) -> Iterator[list[str]]:
    token = ""
    for _ in range(len(listed) + 1):
        page, token = page_of(listed, size, token, descending=descending, scope="jobs")
        yield list(page)
        if not token:
            return
    pytest.fail("there are more pages than things")


@given(ids, st.integers(1, 5), st.booleans())
def test_all_pages_together_are_the_list(listed: list[str], size: int, descending: bool) -> None:
    cut = list(pages(listed, size, descending=descending))
    joined = [one for page in cut for one in page]
    assert joined == (listed[::-1] if descending else listed)
    assert all(len(page) == size for page in cut[:-1])
    assert len(cut) == max(1, -(-len(listed) // size))


@given(ids.filter(bool), st.booleans(), st.data())
def test_changes_between_pages_neither_repeat_nor_hide_other_items(
    listed: list[str], descending: bool, data: st.DataObject
) -> None:
    page, token = page_of(listed, 2, "", descending=descending)
    rest = [one for one in listed if one not in page]
    gone = data.draw(st.sampled_from(listed))
    if token:
        left = [one for one in listed if one != gone]
        second, _ = page_of(left, PAGE_SIZE_MAX, token, descending=descending)
        assert sorted(second) == [one for one in rest if one != gone]


@pytest.mark.parametrize(
    ("asked", "given"), [(0, PAGE_SIZE_DEFAULT), (1, 1), (PAGE_SIZE_MAX, PAGE_SIZE_MAX), (10**6, PAGE_SIZE_MAX)]
)
def test_a_page_has_a_size_by_default_and_at_most(asked: int, given: int) -> None:
    page, _ = page_of([f"{number:05}" for number in range(2 * PAGE_SIZE_MAX)], asked, "")
    assert len(page) == given


@pytest.mark.parametrize(
    ("size", "token", "field"),
    [(-1, "", "page_size"), (1, "x", "page_token"), (1, "!!!!", "page_token"), (1, "/w==", "page_token")],
)
def test_invalid_page_requests_name_the_field(size: int, token: str, field: str) -> None:
    with pytest.raises(Problem) as problem:
        page_of(["a", "b"], size, token, scope="jobs")
    assert [violation.field for violation in problem.value.violations] == [field]


def test_a_token_belongs_to_its_list() -> None:
    _, token = page_of(["a", "b"], 1, "", scope="tenant=vision")
    with pytest.raises(Problem, match="another filter"):
        page_of(["a", "b"], 1, token, scope="tenant=speech")
