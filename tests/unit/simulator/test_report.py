"""Reports: one self-contained, reproducible page, in which no name can do harm."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.simulator.commands import cotenant

pytest.importorskip("matplotlib", reason="needs the extra `research`")
pytest.importorskip("jinja2", reason="needs the extra `research`")

HOSTILE = "<script>alert(1)</script>&\"'$x^2$"
SAMPLE = ("--trace", "sample", "--cluster", "2x8")


class Page(HTMLParser):
    """Collects the tags of a page, their references, and its text; fails on an unclosed tag."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            assert not name.startswith("on")

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a report on a trace and arms with malicious names."""
    directory = tmp_path_factory.mktemp("report") / HOSTILE.replace("/", "")
    directory.mkdir()
    trace = directory / "jobs.csv"
    rows = "".join(f'"{HOSTILE.replace(chr(34), "")}{n}",{n * 60},{600 + n},{n % 4 + 1}\n' for n in range(30))
    trace.write_text("job_id,submission_time,duration,num_gpu\n" + rows + f'"{HOSTILE.replace(chr(34), "")}",9,9,99\n')
    file = directory / "report.html"
    arms = ("--arms", "fifo,las", "--arm", f"{HOSTILE}=srsf,predictor=noisy-oracle")
    told = cotenant("compare", "--trace", trace, "--cluster", "2x4", *arms, "--seeds", 2, "--jobs", 1, "--report", file)
    assert told.exit_code == 0, told.stderr
    return file


@pytest.mark.deep
def test_a_report_refers_to_nothing_outside_itself(report: Path) -> None:
    text = report.read_text()
    page = read(text)
    assert [target for target in page.references if not target.startswith("#")] == []
    assert {target[1:] for target in page.references} <= set(page.ids)
    assert re.search(r"https?://|@import|url\((?!#)", text) is None
    assert {"link", "iframe", "img", "object"} & set(page.tags) == set()
    assert page.tags.count("script") == 1
    [policy] = re.findall(r'content="(default-src [^"]*)"', text)
    [script] = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.endswith(f"script-src 'sha256-{own}'"), "no other script runs"
    assert len(page.ids) == len(set(page.ids))


def test_what_others_named_is_shown_as_it_is(report: Path) -> None:
    text = report.read_text()
    assert text.count("<script") == 1, "the one of the tables"
    page = read(text)
    assert "has the smallest average JCT" in page.text or "No arm has a smaller average JCT" in page.text
    assert f"{HOSTILE}: average JCT ×" in page.text  # in the page's words
    assert text.count("&lt;script&gt;") > 5  # and in the plots


def test_a_report_lists_its_assumptions(report: Path) -> None:
    text = " ".join(read(report.read_text()).text.split())
    for told in (
        "lower bound",
        "0 to 1; an arm without randomness is run once",
        "noisy-oracle",
        "Jobs that can never run",
        "Overlay",
        "numpy",
    ):
        assert told in text


@pytest.mark.deep
def test_the_same_command_writes_the_same_report(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.html" for name in "ab"]
    for jobs, file in enumerate(files, 1):
        told = cotenant("compare", *SAMPLE, "--arms", "fifo,las", "--jobs", jobs, "--report", file)
        assert told.exit_code == 0, told.stderr
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.deep
def test_plots_are_written_as_png_too(tmp_path: Path) -> None:
    told = cotenant("compare", *SAMPLE, "--arms", "fifo", "--jobs", 1, "--png", tmp_path / "plots")
    assert told.exit_code == 0, told.stderr
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"averages.png", "distributions.png", "over-time.png", "waits.png", "by-size.png"} <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


def test_a_single_simulation_can_be_reported(tmp_path: Path) -> None:
    file, events = tmp_path / "one.html", tmp_path / "one.jsonl"
    told = cotenant("simulate", *SAMPLE, "--queue", "las", "--report", file, "--events", events, "--json")
    assert told.exit_code == 0, told.stderr
    assert "las on sample" in read(file.read_text()).text
    assert json.loads(told.stdout)["finished"] == 260
    assert cotenant("replay", "--check", events).exit_code == 0


def test_an_unwritable_target_is_reported_before_simulating(tmp_path: Path) -> None:
    for target in (tmp_path / "no" / "r.html", tmp_path):
        told = cotenant("compare", "--trace", "/nowhere", "--cluster", "1x8", "--arms", "fifo", "--report", target)
        assert (told.exit_code, "cannot be written" in told.stderr) == (2, True)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = cotenant("compare", *SAMPLE, "--arms", "fifo", "--report", tmp_path / "r.html")
    assert (told.exit_code, "pip install 'cotenant[research]'" in told.stderr) == (2, True)


@pytest.mark.deep
def test_plots_are_imported_only_for_a_report() -> None:
    code = (
        "import sys; from cotenant.cli.main import run;"
        "run(['compare', '--trace', 'sample', '--cluster', '2x8', '--arms', 'fifo', '--jobs', '1']);"
        "print({'matplotlib', 'jinja2', 'pyarrow'} & set(sys.modules))"
    )
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert told.splitlines()[-1] == "set()"
