"""A table that changes, and its readers."""

from __future__ import annotations

import asyncio
import random

from cotenant.web.changes import REMOVALS_MAX, Changes
from cotenant.web.streams import ROWS_PER_EVENT, batch_events, follow, positions


def test_a_new_reader_gets_all_rows_and_then_each_change_once() -> None:
    table = Changes()
    table.put("a", "1")
    table.put("b", "2")
    first = table.after("")
    assert (first.whole, first.rows) == (True, ["1", "2"])
    for value in ("3", "4", "5"):
        table.put("a", value)
    table.remove("b")
    then = table.after(first.position)
    assert (then.whole, then.rows, then.removed) == (False, ["5"], ["b"])
    assert table.after(then.position).rows == []


def test_an_equal_row_is_no_change() -> None:
    table = Changes()
    table.put("a", "1")
    at = table.position
    table.put("a", "1")
    table.remove("x")
    assert table.position == at


def test_a_row_that_comes_back_is_not_removed() -> None:
    table = Changes()
    table.put("a", "1")
    at = table.position
    table.remove("a")
    table.put("a", "1")
    batch = table.after(at)
    assert (batch.rows, batch.removed) == (["1"], [])


def test_a_reader_of_another_table_or_from_too_long_ago_begins_anew() -> None:
    table, other = Changes(), Changes()
    table.put("a", "1")
    other.put("a", "1")
    assert table.after(other.position).whole
    for text in ("", "x", f"{table.position}0", table.position.replace("-1", "-x")):
        assert table.after(text).whole
    at = table.position
    for number in range(REMOVALS_MAX + 1):
        table.put(str(number), "1")
        table.remove(str(number))
    assert table.after(at).whole
    assert not table.after(table.position).whole


def test_a_reader_that_resumes_anywhere_ends_up_with_the_same_rows() -> None:
    draw, table = random.Random(7), Changes()
    known: dict[str, str] = {}
    at = ""
    for step in range(2000):
        name = f"n{draw.randrange(20)}"
        table.remove(name) if draw.random() < 0.3 else table.put(name, f"{name}:{step // 3}")
        if draw.random() < 0.2:
            batch = table.after(at)
            at = batch.position
            known = {} if batch.whole else known
            for gone in batch.removed:
                known.pop(gone, None)
            known |= {row.partition(":")[0]: row for row in batch.rows}
            assert known == {row.partition(":")[0]: row for row in table.after("").rows}


async def test_a_reader_waits_for_a_change() -> None:
    table = Changes()
    waiting = asyncio.create_task(table.wait(table.position, 30.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    table.put("a", "1")
    await asyncio.wait_for(waiting, 5.0)


def test_only_the_last_event_of_a_large_batch_has_the_position() -> None:
    table = Changes()
    for number in range(2 * ROWS_PER_EVENT + 1):
        table.put(str(number), str(number))
    texts = batch_events("jobs", table.after(""), "jobs=x-1")
    assert [text.startswith("id: jobs=x-1\n") for text in texts] == [False, False, True]
    assert ['"whole":true' in text for text in texts] == [True, False, False]


async def test_a_stream_resumes_without_a_gap_and_ends_with_the_session() -> None:
    table, alive = Changes(), True
    table.put("a", '"1"')
    stream = follow({"jobs": table}, "", lambda: alive)
    assert (await anext(stream)).startswith("retry:")
    first = await anext(stream)
    assert '"rows":["1"]' in first
    await stream.aclose()
    table.put("b", '"2"')
    seen = first.partition("id: ")[2].partition("\n")[0]
    assert positions(seen) == {"jobs": f"{table.position.partition('-')[0]}-1"}
    again = follow({"jobs": table}, seen, lambda: alive)
    await anext(again)
    text = await anext(again)
    assert '"whole":false,"rows":["2"]' in text
    alive = False
    table.put("c", '"3"')
    assert [one async for one in again] == ["event: session\ndata: {}\n\n"]
