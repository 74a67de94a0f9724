from __future__ import annotations

from tools.reasons import PAGE, page

from cotenant.core.model.reason_docs import MEANINGS
from cotenant.core.model.refusal import Code


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_every_reason_has_a_meaning_and_a_remedy() -> None:
    assert set(MEANINGS) == set(Code)
    assert all(meaning.means.endswith(".") and meaning.remedy.endswith(".") for meaning in MEANINGS.values())
