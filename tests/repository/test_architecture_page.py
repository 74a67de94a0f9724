from __future__ import annotations

from tools import architecture


def test_the_page_is_what_the_code_says() -> None:
    assert architecture.PAGE.read_text() == architecture.page(), "run `make docs`"
