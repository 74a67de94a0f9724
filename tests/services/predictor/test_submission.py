from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.services.predictor.conftest import query, run, spec

from cotenant.core.estimates import Submission
from cotenant.core.finished import facts_of
from cotenant.core.jobs import Request, Role
from cotenant.services.predictor.words import observation_of, query_of
from cotenant.v1 import job_pb2, resources_pb2

TOLD: dict[str, Any] = {"submitter": "ann", "submit_time": Timestamp(seconds=1_000)}
WORK = spec(labels={"epochs": "30", "data": "coco"}, kind=job_pb2.JOB_KIND_TRAINING, steps_total=500)
SUBMISSION = Submission(
    submitter="ann",
    submitted_seconds=1_000.0,
    kind="training",
    roles=(Role("worker", 1, Request(1000, 4)),),
    steps_total=500,
    labels=(("data", "coco"), ("epochs", "30")),
)


def test_what_a_submission_tells_is_the_same_in_a_question_and_at_the_end() -> None:
    asked, ended = query_of(query(spec=WORK, **TOLD)), observation_of(run("j1", seconds=60, spec=WORK, **TOLD))
    assert asked.submission == ended.submission == SUBMISSION
    assert facts_of(asked) == facts_of(ended)
    assert ended.seen_seconds == 2_000.0


def test_numbers_in_labels_are_numbers() -> None:
    facts = dict(facts_of(query_of(query(spec=WORK, **TOLD))))
    assert (facts["label epochs"], facts["label data"]) == (30.0, "coco")


def test_a_job_that_was_not_submitted_has_no_time() -> None:
    assert query_of(query()).submission.submitted_seconds is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"submitter": "a\nb"}, "submitter: "),
        ({"spec": spec(labels={f"l{number}": "" for number in range(65)})}, "its spec has 65 labels; 64 are taken"),
        (
            {"spec": spec(roles=[job_pb2.Role(replicas=1, resources=resources_pb2.ResourceRequest(memory_bytes=-1))])},
            "memory_bytes is -1",
        ),
    ],
)
def test_a_submission_that_cannot_be_is_told(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        query_of(query(**fields))
