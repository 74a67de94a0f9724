"""Training of predictors in a separate process, so that no estimate waits for it.

A thread would not do: training on a hundred thousand jobs holds the interpreter for seconds. The process is started for
one training and ends with it, so that its memory is freed; it runs at the lowest priority.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import structlog

from cotenant import telemetry
from cotenant.core.policy.protocols import Predictor, TrainingTask, Trains

log = structlog.get_logger()

trained = telemetry.counter("cotenant.predictor.trainings", "{model}", "Models trained")


class Trainer:
    """Periodically runs the trainings that predictors ask for, and passes them the results."""

    def __init__(self, predictors: Mapping[str, Predictor], ready: Callable[[], bool] = lambda: True) -> None:
        self._ready = ready  # whether the saved models are restored; training before would repeat work
        self._predictors = {name: one for name, one in predictors.items() if isinstance(one, Trains)}

    async def run(self, pause_seconds: float) -> None:
        """Train predictors one after another, until cancelled."""
        while True:
            if self._ready():
                await self.train_due()
            await asyncio.sleep(pause_seconds)

    async def train_due(self) -> None:
        """Train the predictors that are due."""
        for name, predictor in self._predictors.items():
            try:
                training_task = predictor.training_task()
                if training_task is None:
                    continue
                predictor.adopt(await train_in_process(training_task))
            except Exception as error:  # a predictor may raise anything; the process may be killed
                log.error("training_failed", predictor=name, error=f"{type(error).__name__}: {error}")
            else:
                trained.add(1)
                log.info("model_trained", predictor=name)


async def train_in_process(training_task: TrainingTask) -> Any:
    """Return the result of a training in a separate process, which is killed if this is cancelled."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by threads, gRPC's among them
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(19,))
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, training_task.train)
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
