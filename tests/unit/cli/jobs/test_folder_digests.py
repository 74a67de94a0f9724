"""The digests that a client remembers of a folder's files."""

from __future__ import annotations

import json
from pathlib import Path

from cotenant.cli.jobs.folder_digests import FORMAT, _remembered


def test_a_size_that_no_file_has_is_not_believed(tmp_path: Path) -> None:
    memory = tmp_path / "folder.json"
    row = [2**51, 0, 3, 2, 7, "ed" * 32]
    memory.write_text(json.dumps({"format": FORMAT, "files": {"a": row}}))
    assert _remembered(memory) == {}
    memory.write_text(json.dumps({"format": FORMAT, "files": {"a": [1, *row[1:]]}}))
    assert list(_remembered(memory)) == [b"a"]
