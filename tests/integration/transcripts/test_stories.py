from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.transcripts.story import tell

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_a_story_goes_as_it_is_told(path: Path) -> None:
    for written, happened in tell(path.read_text(encoding="utf-8")):
        assert happened == written


def test_there_are_stories() -> None:
    assert len(STORIES) >= 6
