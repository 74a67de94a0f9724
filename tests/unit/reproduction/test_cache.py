"""Cached figures are used if nothing that they depend on has changed, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cotenant.reproduction import cache
from cotenant.reproduction.cache import BadDirectory, ResultCache
from cotenant.reproduction.model import BUNDLED, Asked, Case, Claim, Data, Done, Figures, Findings, Stopped
from cotenant.reproduction.runner import Reproduced, reproduce

DONE: list[str] = []  # cases run here


@dataclass(frozen=True, slots=True)
class Noted:
    """Returns its number, and records that it ran."""

    number: int

    def run(self, stopped: Stopped) -> Figures | None:
        """Do it."""
        if stopped():
            return None
        DONE.append(f"{self.number}")
        return Figures({"number": float(self.number), "none": float("nan")}, {"all": (1.0, float(self.number))})


@dataclass
class Small:
    """A paper of a few cases."""

    works: Sequence[Noted] = (Noted(1), Noted(2), Noted(3))
    repeatable: bool = True
    name: str = "small"
    title: str = "A small paper"
    reference: str = "nobody, never"
    claims: Sequence[Claim] = ()
    assumptions: Sequence[str] = ()
    unsaid: Sequence[str] = ()
    done: Done | None = None

    def cases(self, asked: Asked) -> Sequence[Case]:
        """Run each work."""
        return [Case("all", f"arm {at}", 0, work, self.repeatable) for at, work in enumerate(self.works)]

    def findings(self, asked: Asked, done: Done) -> Findings:
        """Return the seen figures."""
        self.done = done
        return Findings(())


def run(paper: Small, directory: Path, *, data: Data = BUNDLED, most: int = 9) -> tuple[Reproduced, list[str]]:
    """Run a paper, stopping after some cases; returns which cases ran instead of coming from the cache."""
    DONE.clear()
    asked = Asked(quick=True, seeds=(0,), data=data)
    found = reproduce(paper, asked, keep=directory, stopped=lambda: len(DONE) >= most)
    return found, DONE.copy()


def test_a_run_that_was_cut_short_goes_on_where_it_was(tmp_path: Path) -> None:
    first, did = run(Small(), tmp_path / "a" / "b", most=2)
    assert (did, first.complete, first.kept) == (["1", "2"], False, 0)
    paper = Small()
    second, did = run(paper, tmp_path / "a" / "b")
    assert (did, second.complete, second.kept, second.done) == (["3"], True, 2, 3)
    assert second.processor_seconds >= first.processor_seconds > 0
    assert paper.done
    assert [paper.done.mean("all", f"arm {at}", "number") for at in range(3)] == [1, 2, 3]
    assert paper.done.of("all", "arm 1")[0].series == {"all": (1.0, 2.0)}
    assert paper.done.spread("all", "arm 1", "none") is None


def test_another_work_of_the_same_name_is_run(tmp_path: Path) -> None:
    run(Small(), tmp_path)
    assert run(Small((Noted(1), Noted(7), Noted(3))), tmp_path)[1] == ["7"]


def test_other_code_takes_nothing_and_what_it_leaves_is_there_for_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Small(), tmp_path)
    with monkeypatch.context() as other:
        other.setattr(cache, "_digest_of_code", lambda: "other")
        assert run(Small(), tmp_path)[1] == ["1", "2", "3"]
    assert run(Small(), tmp_path)[1] == []


def test_the_code_is_that_which_simulates_and_what_is_bundled(tmp_path: Path) -> None:
    rooms = [Path(cache.__file__).parent.parent / room for room in cache.PACKAGES]
    seen = {path.name for room in rooms for path in cache._files(room)}
    assert {"cycle.py", "borda_mlfq.py", "engine.py", "coda.py", "philly_two.csv.gz"} <= seen


def test_rewritten_data_invalidates_the_cache(tmp_path: Path) -> None:
    data = Data(tmp_path / "data")
    (tmp_path / "data" / "itp").mkdir(parents=True)
    (tmp_path / "data" / "itp" / "a.csv").write_text("1")
    run(Small(), tmp_path / "kept", data=data)
    assert run(Small(), tmp_path / "kept", data=data)[1] == []
    (tmp_path / "data" / "itp" / "a.csv").write_text("12")
    assert run(Small(), tmp_path / "kept", data=data)[1] == ["1", "2", "3"]
    assert run(Small(), tmp_path / "kept")[1] == ["1", "2", "3"]


def test_what_is_live_is_run_every_time(tmp_path: Path) -> None:
    run(Small(repeatable=False), tmp_path)
    assert run(Small(repeatable=False), tmp_path)[1] == ["1", "2", "3"]


def test_a_truncated_line_is_run_again(tmp_path: Path) -> None:
    run(Small(), tmp_path)
    file = tmp_path / "small.jsonl"
    file.write_text("[]\n3\n" + file.read_text()[:-30])
    assert run(Small(), tmp_path)[1] == ["3"]
    assert run(Small(), tmp_path)[1] == []


def test_an_uncreatable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadDirectory, match=f"figures cannot be cached in {tmp_path}/file/in: Not a directory"):
        ResultCache(tmp_path / "file" / "in", "small")
