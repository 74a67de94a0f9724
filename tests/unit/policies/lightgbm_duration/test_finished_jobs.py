"""What was known of a job at its submission."""

from __future__ import annotations

import gc
import tracemalloc

from cotenant.core.model.estimate import Query, Submission
from cotenant.policies.lightgbm_duration.finished_jobs import facts_of


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
