from __future__ import annotations

from tools.lifecycle import PAGE, page


def test_the_page_of_lifecycles_is_what_the_tables_say() -> None:
    assert PAGE.read_text() == page(), "make docs"
