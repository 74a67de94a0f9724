"""How a long line is shortened: both ends stay, as much of them as is allowed."""

from __future__ import annotations

import pytest

from cotenant.core.failures.classifier import LINE_LENGTH_MAX, shorten


@pytest.mark.parametrize("length", [0, 1, LINE_LENGTH_MAX, LINE_LENGTH_MAX + 1, 10 * LINE_LENGTH_MAX])
def test_a_line_keeps_as_much_of_both_ends_as_is_allowed(length: int) -> None:
    line = "".join(chr(0x4E00 + number) for number in range(length))
    short = shorten(f"  {line}\n")
    if length <= LINE_LENGTH_MAX:
        assert short == line
        return
    first, last = short.split("...")
    assert len(first) == len(last)
    assert LINE_LENGTH_MAX - 1 <= len(short) <= LINE_LENGTH_MAX
    assert line.startswith(first)
    assert line.endswith(last)
