from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.transcripts.story import replay

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_transcripts_match_their_replay(path: Path) -> None:
    for written, happened in replay(path.read_text(encoding="utf-8")):
        assert happened == written


def test_transcripts_exist() -> None:
    assert len(STORIES) >= 6
