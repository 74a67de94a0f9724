"""The protos in the package."""

from __future__ import annotations

from pathlib import Path

from tests.support.paths import ROOT

from cotenant.transcoding import shipped_protos


def test_they_are_those_of_the_checkout() -> None:
    for path in shipped_protos.files():
        if path.parts[0] == "cotenant":
            ours = (ROOT / "protos" / path).read_bytes()
            assert (shipped_protos.DIRECTORY / path).read_bytes() == ours, "run `make setup`"


def test_copies_have_all_that_they_import(tmp_path: Path) -> None:
    copied = shipped_protos.copy(tmp_path)
    names = {path.relative_to(tmp_path).as_posix() for path in copied}
    assert "cotenant/v1/job_service.proto" in names
    for path in copied:
        imported = [line.split('"')[1] for line in path.read_text().splitlines() if line.startswith("import ")]
        assert {name for name in imported if not name.startswith("google/protobuf/")} <= names
