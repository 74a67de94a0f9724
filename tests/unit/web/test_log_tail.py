"""Output becomes lines that are bounded, whole and harmless."""

from __future__ import annotations

from cotenant.web.log_tail import LINE_CHARACTERS_MAX, LINES_MAX, LogTail, shown


def test_lines_are_put_together_over_pieces_by_rank() -> None:
    tail = LogTail()
    assert tail.take() is None
    tail.feed(0, "ä".encode()[:1])
    tail.feed(1, b"one\ntw")
    tail.feed(0, "ä".encode()[1:] + b"\n")
    assert tail.take() == {"lines": [(1, "one"), (0, "ä")], "dropped": 0, "begun": [(1, "tw")]}
    assert tail.take() is None
    tail.feed(1, b"o\n")
    assert tail.take() == {"lines": [(1, "two")], "dropped": 0, "begun": []}


def test_binary_output_is_shown_as_text() -> None:
    tail = LogTail()
    tail.feed(0, bytes(range(256)) + b"\n")
    batch = tail.take()
    assert batch
    assert all(text.isprintable() for _, text in batch["lines"])


def test_output_that_is_too_fast_is_dropped_and_counted() -> None:
    tail = LogTail()
    tail.feed(0, b"\n".join(b"%d" % number for number in range(LINES_MAX + 6)) + b"\n")
    batch = tail.take()
    assert batch
    assert (len(batch["lines"]), batch["lines"][0], batch["dropped"]) == (LINES_MAX, (0, "6"), 6)


def test_a_line_without_end_is_bounded() -> None:
    tail = LogTail()
    for _ in range(100):
        tail.feed(0, b"x" * 10_000)
    assert sum(map(len, tail._begun.values())) <= 4 * LINE_CHARACTERS_MAX
    batch = tail.take()
    assert batch
    assert len(batch["begun"][0][1]) < LINE_CHARACTERS_MAX + 40


def test_a_line_of_ten_megabytes_costs_what_is_shown_of_it() -> None:
    tail = LogTail()
    for _ in range(160):
        tail.feed(0, b"x" * 65536)
        assert sum(len(one) for one in tail._begun.values()) <= 8_000
    tail.feed(0, b"end\nnext\n")
    batch = tail.take()
    assert batch
    [(_, first), (_, second)] = batch["lines"]
    assert len(first) < 2_100
    assert first.endswith("more characters")
    assert second == "next"


def test_a_progress_bar_is_shown_as_it_ends_up() -> None:
    assert shown("10 %\r100 %") == "100 %"
    assert shown("line of windows\r") == "line of windows"
