from __future__ import annotations

from tools import architecture


def test_the_page_is_up_to_date() -> None:
    assert architecture.PAGE.read_text() == architecture.page(), "run `make docs`"
