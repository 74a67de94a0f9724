"""Lets predictors learn beside the service: a lesson is learnt in a process of its own, so that no estimate waits.

A thread would not do: to go through a hundred thousand jobs holds the interpreter for seconds. The process is started
for a lesson and ends with it, so that its memory is given back; it runs at the lowest priority.
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
from cotenant.core.policy.protocols import Lesson, Predictor, Trains

log = structlog.get_logger()

trained = telemetry.counter("cotenant.predictor.trainings", "{model}", "Models learnt")


class Trainer:
    """Asks predictors from time to time whether there is something to be learnt, and brings them what came of it."""

    def __init__(self, predictors: Mapping[str, Predictor], ready: Callable[[], bool] = lambda: True) -> None:
        self._ready = ready  # whether what was learnt before is there: else it would be learnt twice
        self._predictors = {name: one for name, one in predictors.items() if isinstance(one, Trains)}

    async def run(self, pause_seconds: float) -> None:
        """Let predictors learn, one after another, until cancelled."""
        while True:
            if self._ready():
                await self.train_due()
            await asyncio.sleep(pause_seconds)

    async def train_due(self) -> None:
        """Let those predictors learn for which it is time."""
        for name, predictor in self._predictors.items():
            try:
                lesson = predictor.lesson()
                if lesson is None:
                    continue
                predictor.adopt(await learnt(lesson))
            except Exception as error:  # whatever a stranger's predictor does; a worker that was killed, too
                log.error("training_failed", predictor=name, error=f"{type(error).__name__}: {error}")
            else:
                trained.add(1)
                log.info("trained", predictor=name)


async def learnt(lesson: Lesson) -> Any:
    """Learn a lesson in a process of its own. When this is cancelled the process is killed."""
    context = multiprocessing.get_context("spawn")  # a fork would take threads' locks with it, gRPC's among them
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=os.nice, initargs=(19,))
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, lesson.train)
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
