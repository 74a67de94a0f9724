"""Links in the documentation resolve, and every page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def _headings(page: Path) -> set[str]:
    """Return the anchors of a page, as code forges derive them from headings."""
    lines = CODE.sub(lambda code: code.group().strip("`") if "\n" not in code.group() else "", page.read_text())
    found = re.findall(r"^#+ (.+)$", lines, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def _links(page: Path) -> list[tuple[Path, str]]:
    """Return the files that a page links to, each with the anchor."""
    targets = [link for link in LINK.findall(CODE.sub("", page.read_text())) if "://" not in link]
    split = [target.partition("#") for target in targets if not target.startswith("mailto:")]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in split]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for path, anchor in _links(page):
        assert path.exists(), f"{path} does not exist"
        assert not anchor or path.suffix != ".md" or anchor in _headings(path), f"{path} has no heading #{anchor}"


def test_every_page_is_in_the_index() -> None:
    listed = {path for path, _ in _links(DOCS / "README.md")}
    pages = {*DOCS.glob("*.md"), *(DOCS / "tutorials").glob("*.md")} - {DOCS / "README.md", DOCS / "index.md"}
    assert sorted(page.name for page in pages - listed) == []


def test_the_pictures_of_the_dashboard_are_those_that_its_tests_take() -> None:
    taken = set(re.findall(r'\.check\("(\w+)"\)', (ROOT / "tests/end_to_end/test_dashboard.py").read_text()))
    pages = (ROOT / "docs").rglob("*.md")
    shown = set(re.findall(r"_static/dashboard-([a-z]+)\.png", " ".join(page.read_text() for page in pages)))
    kept = {path.stem.removeprefix("dashboard-") for path in (ROOT / "docs/_static").glob("dashboard-*.png")}
    assert shown == kept
    assert kept <= taken
