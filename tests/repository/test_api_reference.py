from __future__ import annotations

import re
from collections import Counter

from tools import protos
from tools.api_reference import PAGES, Reference, page_of

from cotenant.transcoding import api_model

API = api_model.load(protos.descriptors())
WRITTEN = {path.name: path.read_text() for path in PAGES.glob("*.md")}
LINK = re.compile(r"\]\(([\w-]*(?:\.md)?)#([^)]+)\)")
HEADING = re.compile(r"^#+ (\w+)$", re.MULTILINE)


def test_the_pages_are_up_to_date() -> None:
    assert Reference(API).pages == WRITTEN, "run `make docs`"


def test_every_method_and_type_has_one_anchor() -> None:
    for service in API.services:
        headings = Counter(HEADING.findall(WRITTEN[page_of(service.name)]))
        assert max(headings.values()) == 1, f"{service.name} has two parts with one name; anchors would change"
        assert {method.name for method in service.methods} <= set(headings)
    for full_name, page in Reference(API).places.items():
        assert HEADING.findall(WRITTEN[page]).count(full_name.rpartition(".")[2]) == 1, full_name


def test_links_lead_to_headings() -> None:
    for page, text in WRITTEN.items():
        for target, anchor in LINK.findall(text):
            if not target.startswith("http"):
                assert anchor in {name.lower() for name in HEADING.findall(WRITTEN[target or page])}, (page, anchor)


def test_every_method_says_how_it_is_called() -> None:
    for service in API.services:
        text = WRITTEN[page_of(service.name)]
        for method in service.methods:
            part = text.split(f"## {method.name}\n", 1)[1].split("\n## ", 1)[0]
            assert method.http
            assert f"- HTTP: `{method.http.verb} {method.http.path}`" in part
            assert "- Callable by: " in part
            assert ("audited" in part) == method.call.audited
