from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from google.protobuf.wrappers_pb2 import StringValue
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec.errors import Problem
from cotenant.rpc import paging
from cotenant.rpc.paging import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX, PageRequest, page_of, page_of_messages

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


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 5), st.booleans())
async def test_pages_of_messages_are_bounded_by_count_and_by_bytes(
    sizes: list[int], size: int, descending: bool
) -> None:
    """With a bound of a tenth of what the largest messages have together; a message that is larger stands alone."""
    ids = [f"{place:02d}" for place in range(len(sizes))]

    def message(item: str) -> StringValue | None:
        return StringValue(value="x" * sizes[int(item)]) if item != "03" else None  # deleted in between

    seen, token = list[int](), ""
    with patch.object(paging, "PAGE_BYTES_MAX", 40):
        while True:
            asked = PageRequest.read(size, token, "things")
            page = await page_of_messages(ids, message, asked, descending=descending)
            assert len(page.items) <= size
            assert sum(one.ByteSize() for one in page.items) <= 40 or len(page.items) == 1
            seen += [len(one.value) for one in page.items]
            if not (token := page.next_token):
                break
    expected = [length for place, length in enumerate(sizes) if place != 3]
    assert seen == (expected[::-1] if descending else expected)


@pytest.mark.parametrize(
    "token", ["?", "e30=", "W10=", "WyJ0aGluZ3MiXQ==", "WyJ0aGluZ3MiLCBbXV0=", "WyJ0aGluZ3MiLCAxXQ=="]
)
def test_other_tokens_are_refused(token: str) -> None:
    with pytest.raises(Problem, match="page_token: is not a page token of this service"):
        PageRequest.read(1, token, "things")


def test_a_token_of_another_list_is_refused() -> None:
    _, token = page_of(["a", "b"], 1, "", scope="things")
    with pytest.raises(Problem, match="page_token: belongs to another list"):
        PageRequest.read(1, token, "others")
