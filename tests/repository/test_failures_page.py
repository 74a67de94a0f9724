from __future__ import annotations

from tools.failures import PAGE, page


def test_the_page_of_failures_is_what_the_rules_say() -> None:
    assert PAGE.read_text() == page(), "make docs"
