"""`submit --git`: which words are a URL and a revision, what is checked out, and what a user reads if it cannot be."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cotenant.cli.jobs.git_checkout import Source, check_out, parse_source
from cotenant.cli.outcome import CommandError


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a tag `v1`, and a later commit."""
    place = tmp_path / "train"
    place.mkdir()

    def git(*words: str) -> None:
        own = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
        subprocess.run(["git", *own, *words], cwd=place, check=True, capture_output=True)

    git("init", "--quiet")
    for text in ("one", "two"):
        (place / "train.py").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "-m", text)
        if text == "one":
            git("tag", "v1")
    return place


def test_a_revision_is_checked_out(repository: Path, tmp_path: Path) -> None:
    for revision, text in (("v1", "one"), ("", "two")):
        folder = tmp_path / f"to-{revision}"
        folder.mkdir()
        commit = check_out(Source(str(repository), revision), str(folder), os.environ)
        assert len(commit) == 40
        assert (folder / "train.py").read_text() == text


def test_what_git_refuses_is_told(repository: Path, tmp_path: Path) -> None:
    def said(url: object, revision: str) -> str:
        with pytest.raises(CommandError) as raised:
            check_out(Source(str(url), revision), str(tmp_path), os.environ)
        return raised.value.message

    assert said(repository, "v9") == f"--git: {repository} has no branch, tag or commit v9"
    assert "fetch of /no/where failed: " in said("/no/where", "main")
    assert "ext" in said("ext::sh -c 'touch hacked'", "main")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("text", ["", "@main", "--upload-pack=x", "https://host/a@", "/repository@-x"])
def test_what_names_no_repository_is_refused(text: str) -> None:
    with pytest.raises(CommandError):
        parse_source(text)


def test_an_at_sign_before_the_path_is_part_of_the_url() -> None:
    assert parse_source("https://ada:x@host/a") == Source("https://ada:x@host/a")
    assert parse_source("git@host:a/b@main") == Source("git@host:a/b", "main")
    assert parse_source("/srv/a@v1") == Source("/srv/a", "v1")
