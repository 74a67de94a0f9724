"""Numbers of jobs: no two ids have the same one, and each leads back to its id."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job_array import INDEX_MAX
from cotenant.core.model.job_number import DIGITS, ID_DIGITS, INDEX_DIGITS, encode, id_of, number_of
from cotenant.services.queue.jobs.job_ids import JobIdGenerator, is_id

LATER = 20 * 60 * 1000  # milliseconds: the tasks of arrays have numbers from then on
JOBS = st.integers(0, 2**60 - 1).map(lambda number: encode(number, ID_DIGITS))
ARRAYS = st.integers(LATER << 20, 2**60 - 1).map(lambda number: encode(number, ID_DIGITS))
TASKS = st.tuples(ARRAYS, st.integers(0, INDEX_MAX)).map(lambda pair: f"{pair[0]}_{pair[1]}")


@given(st.one_of(JOBS, TASKS))
def test_a_number_leads_back_to_its_id(job_id: str) -> None:
    assert is_id(job_id)
    assert id_of(number_of(job_id)) == job_id


@given(st.lists(st.one_of(JOBS, TASKS), min_size=2, max_size=20, unique=True))
def test_no_two_ids_have_the_same_number(job_ids: list[str]) -> None:
    assert len({number_of(job_id) for job_id in job_ids}) == len(job_ids)


def test_the_first_and_the_last_numbers_of_each_kind_are_apart() -> None:
    last_job, first_task = number_of(DIGITS[-1] * ID_DIGITS), number_of(f"{encode(LATER << 20, ID_DIGITS)}_0")
    assert last_job == 2**60 - 1 < first_task
    assert len(str(INDEX_MAX)) == INDEX_DIGITS


def test_an_id_of_today_is_short_enough_for_the_arithmetic_of_shells() -> None:
    assert number_of(JobIdGenerator().new()) < 2**63


@pytest.mark.parametrize("text", ["", "123", "0" * 13, "00000001abco", "0x9k2m3n4p5q_x", "0x9k2m3n4p5q_1000000"])
def test_other_texts_have_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r".|^$"):
        number_of(text)


def test_a_task_from_before_the_clock_was_set_has_none() -> None:
    with pytest.raises(ValueError, match="the clock was wrong"):
        number_of(f"{encode(1 << 20, ID_DIGITS)}_3")


@pytest.mark.parametrize("number", [-1, 2**60 * 10**6])
def test_other_numbers_have_no_job(number: int) -> None:
    with pytest.raises(ValueError, match="no job has the number"):
        id_of(number)
