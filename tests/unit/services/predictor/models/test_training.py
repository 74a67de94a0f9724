from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from cotenant.core.model.estimate import Candidate, Observation, Query, Submission
from cotenant.policies.history import History
from cotenant.policies.lightgbm_duration.policy import LightgbmDuration
from cotenant.services.predictor.models.training import Trainer, train_in_process


@dataclass(frozen=True)
class Recites:
    """A training that succeeds at once, or fails."""

    what: str

    def train(self) -> str:
        if self.what == "nonsense":
            raise ValueError("that makes no sense")
        return self.what.upper()


class Pupil(History):
    name = "pupil"

    def __init__(self, *lessons: str) -> None:
        super().__init__()
        self.lessons, self.adopted = list(lessons), list[Any]()

    def training_task(self) -> Recites | None:
        return Recites(self.lessons.pop(0)) if self.lessons else None

    def adopt(self, model: Any) -> None:
        self.adopted.append(model)


@pytest.mark.deep
async def test_training_runs_in_another_process_and_returns_its_result() -> None:
    pupil = Pupil("a", "b")
    trainer = Trainer({"pupil": pupil, "history": History()})
    for _ in range(3):
        await trainer.train_due()
    assert pupil.adopted == ["A", "B"]


@pytest.mark.deep
async def test_a_failed_training_is_logged_and_others_continue() -> None:
    poor, good = Pupil("nonsense"), Pupil("a")
    with capture_logs() as logs:
        await Trainer({"poor": poor, "good": good}).train_due()
    assert (logs[0]["event"], logs[0]["predictor"]) == ("training_failed", "poor")
    assert "that makes no sense" in logs[0]["error"]
    assert (poor.adopted, good.adopted) == ([], ["A"])


async def test_no_training_starts_before_the_models_are_restored() -> None:
    pupil = Pupil("a")
    task = asyncio.create_task(Trainer({"pupil": pupil}, ready=lambda: False).run(0.0))
    for _ in range(10):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pupil.lessons == ["a"]


@pytest.mark.timeout(400)  # the training has the lowest priority, and other tests run
async def test_estimates_continue_during_training_and_use_the_new_model() -> None:
    policy = LightgbmDuration(LightgbmDuration.Options(train_min=100))
    for number in range(120):
        told = Submission("ann", 1000.0 * number, "training")
        end = Observation(
            "ann", "bert", "", 1000, 1, Candidate(4), run_seconds=100.0 + number % 7, succeeded=True, submission=told
        )
        policy.observe(end)
    training_task = policy.training_task()
    assert training_task is not None
    training = asyncio.create_task(train_in_process(training_task))
    asked = 0
    while not training.done() and asked < 1000:
        assert policy.estimate(Query("ann", "bert", "", 1000, 1)).predictable
        asked += 1
        await asyncio.sleep(0)
    policy.adopt(await training)
    assert asked > 100
    assert "model 1" in policy.estimate(Query("ann", "bert", "", 1000, 1)).source
