from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.node_agent.runtime.output_tail import TAIL_BYTES_MAX, tail_of


def test_the_last_whole_lines_are_read(tmp_path: Path) -> None:
    lines = [f"step {number}: loss 0.25" for number in range(1000)]
    (tmp_path / "output-3.log").write_text("\n".join(lines) + "\n")
    tail = tail_of(tmp_path, 3)
    assert len(tail.encode()) <= TAIL_BYTES_MAX
    assert tail.splitlines() == lines[-len(tail.splitlines()) :]
    assert len(tail) > TAIL_BYTES_MAX - 40


def test_a_short_current_file_is_preceded_by_the_older_one(tmp_path: Path) -> None:
    (tmp_path / "output-0.log.1").write_text("an old line\nand another\n")
    (tmp_path / "output-0.log").write_text("the last line\n")
    assert tail_of(tmp_path, 0) == "an old line\nand another\nthe last line\n"
    assert tail_of(tmp_path, 0, 28) == "and another\nthe last line\n"


def test_an_endless_line_is_cut_at_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "output-0.log").write_text("x" * 10_000 + "the end")
    tail = tail_of(tmp_path, 0)
    assert len(tail) == TAIL_BYTES_MAX
    assert tail.endswith("the end")


@pytest.mark.parametrize("content", [None, b"", b"short", b"a\0b"])
def test_short_output_is_complete(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "output-0.log").write_bytes(content)
    assert tail_of(tmp_path, 0) == (content or b"").decode().replace("\0", "")


@given(st.binary(max_size=300), st.integers(16, 64))
def test_any_output_fits(tmp_path_factory: pytest.TempPathFactory, content: bytes, bytes_max: int) -> None:
    directory = tmp_path_factory.mktemp("out")
    (directory / "output-0.log").write_bytes(content)
    assert len(tail_of(directory, 0, bytes_max).encode()) <= bytes_max
