"""What was known of a job at its submission, and blocks of ended jobs."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc
import zlib

import pytest

from cotenant.core.model.estimate import Query, Submission
from cotenant.core.model.job import Request, Role
from cotenant.policies.lightgbm_duration.finished_jobs import End, facts_of, pack, unpack


def labelled(number: int) -> Query:
    labels = tuple((f"{label:0250}", f"{number}-{label:0240}") for label in range(64))
    return Query("vision", "bert", "", gpu_milli=1000, replicas=1, submission=Submission("eve", labels=labels))


def test_labels_are_facts_with_numbers_as_numbers() -> None:
    submission = Submission("eve", kind="training", labels=(("team", "vision"), ("batch", "32")))
    facts = dict(facts_of(Query("vision", "bert", "", gpu_milli=1000, replicas=1, submission=submission)))
    assert (facts["job kind"], facts["label team"], facts["label batch"]) == ("training", "vision", 32.0)


def test_the_labels_of_a_job_are_not_kept_with_its_facts() -> None:
    facts_of(labelled(0))
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, 101):  # 3 MiB of labels
            facts_of(labelled(number))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1 << 19
    finally:
        tracemalloc.stop()


def test_requests_are_facts_in_gpus_cores_and_gibibytes_as_far_as_they_are_stated() -> None:
    roles = (
        Role("ps", 2, Request(cores=0)),
        Role("worker", 4, Request(1500, 6, memory_bytes=3 << 29, gpu_type="A100")),
    )
    submission = Submission("eve", kind="training", roles=roles, steps_total=900)
    facts = facts_of(Query("vision", "bert", "run", gpu_milli=6000, replicas=6, submission=submission))
    assert facts == (
        ("tenant", "vision"),
        ("kind", "bert"),
        ("gpus", 6.0),
        ("shape", "2 ps + 4 worker"),
        ("submitter", "eve"),
        ("name", "run"),
        ("job kind", "training"),
        ("steps", 900.0),
        ("ps: replicas", 2.0),
        ("ps: gpus", 0.0),
        ("ps: cores", 0.0),
        ("worker: replicas", 4.0),
        ("worker: gpus", 1.5),
        ("worker: cores", 6.0),
        ("worker: memory", 1.5),
        ("worker: gpu type", "A100"),
    )


def block(*row: object) -> bytes:
    return zlib.compress(json.dumps({"facts": [[["tenant", "ann"]]], "ends": [row]}).encode())


def test_each_figure_of_a_packed_end_is_checked_by_itself() -> None:
    facts = (("tenant", "ann"),)
    for odd in (False, None):
        assert list(unpack(block(0, 5, 9, 1e-9, odd))) == [End(facts, 5.0, 9.0, 1e-9, odd)]
    (undated,) = unpack(pack([End(facts, math.nan, -1.0, 1e300, True)]))
    assert math.isnan(undated.submitted_seconds)
    assert (undated.ended_seconds, undated.run_seconds, undated.surprising) == (-1.0, 1e300, True)
    for row in (
        *((index, 5, 9, 1, None) for index in (-1, 1)),
        *((0, 5, ended, 1, None) for ended in (math.nan, math.inf, None)),
        *((0, 5, 9, run, None) for run in (0, -1, math.inf, math.nan, None)),
        *((0, 5, 9, 1, odd) for odd in (2, "yes")),
        (0, "early", 9, 1, None),
        (0, 5, 9, 1),
    ):
        with pytest.raises(ValueError, match=r"invalid|could not convert"):
            unpack(block(*row))
