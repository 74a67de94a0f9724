"""The demo: the whole mesh with a real workload, a summary and a report, leaving nothing behind."""

from __future__ import annotations

import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.end_to_end import remains
from tests.end_to_end.commands import Cli, environment_of

from cotenant.cli.mesh import demo

DEMO_SECONDS_MAX = 60.0
REFERENCES = {"src", "href", "data", "action", "poster", "srcset", "background"}


def test_the_demo_ends_well_with_a_report_and_leaves_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    with tempfile.TemporaryDirectory(prefix="demo-") as temporary:
        cli = Cli(environment_of(tmp_path, TMPDIR=temporary))
        reported = cli("demo", "--seconds", "10", "--report", report, seconds=DEMO_SECONDS_MAX)
        assert remains.processes_of(Path(temporary)) == {}
        assert list(Path(temporary).iterdir()) == []
    for words in ("The mesh is up", "resnet-auto", "gang-of-2", "NEVER_FITS", "fifo, backfill", str(report)):
        assert words in reported.out
    assert_self_contained(report.read_text())


def test_the_report_defaults_to_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed name in a shared directory would fail for the second user and follow symbolic links."""
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    victim.write_text("precious")
    (shared / "cotenant-demo.html").symlink_to(victim)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    report = demo._write(None, [], [], [], "a machine")
    assert report == tmp_path / "own" / "cotenant" / "demo.html"
    assert_self_contained(report.read_text())
    assert report.stat().st_mode & 0o077 == 0
    assert victim.read_text() == "precious"
    report.unlink()
    report.symlink_to(victim)
    demo._write(None, [], [], [], "a machine")
    assert victim.read_text() == "precious", "a link is replaced"
    assert [path.name for path in report.parent.iterdir()] == ["demo.html"]


def assert_self_contained(page: str) -> None:
    """Check that the page refers to no other files."""
    reader = _References()
    reader.feed(page)
    reader.close()
    assert "svg" in reader.tags
    assert "script" not in reader.tags
    assert [one for one in reader.found if not one.startswith(("#", "data:"))] == []
    assert not re.search(r"@import|url\(", page)


class _References(HTMLParser):
    """Collects the references of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a tag."""
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name.rpartition(":")[2] in REFERENCES]
