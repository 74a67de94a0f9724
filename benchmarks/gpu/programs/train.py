"""Trains a small model with an input pipeline of its own; reports its steps, and logs them with its cores.

    python -m benchmarks.gpu.programs.train image --device cuda --log steps.log --steps 500

`--device none` needs no torch: after each batch of the pipeline it waits as long as a small accelerator would take.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.programs.inputs import make_batch, shape_of, threaded_batches
from benchmarks.gpu.programs.step_log import StepLog

from cotenant import progress

MODELS = ("image", "text", "audio")
WAIT_SECONDS = {"image": 0.02, "text": 0.02, "audio": 0.02}  # of a step of `--device none`
ECHO = {"image": 2}  # how often each batch is trained on (data echoing, Choi et al. 2019), so that cores are no limit


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", choices=("cuda", "cpu", "none"), default="cuda")
    parser.add_argument("--log", type=Path, required=True, help="file of the steps done, by time")
    parser.add_argument("--steps", type=int, default=0, help="end after this many; 0: never")
    parser.add_argument("--workers", type=int, default=0, help="of the pipeline; default: the cores at first")
    parser.add_argument("--small", action="store_true", help="for machines without a GPU")
    arguments = parser.parse_args()
    log = StepLog(arguments.log)
    workers = arguments.workers or len(os.sched_getaffinity(0))
    make = partial(make_batch, arguments.model, shape_of(arguments.model, small=arguments.small))
    source, step = _pipeline_and_step(arguments, make, workers)
    for number, batch in zip(itertools.count(1), source, strict=False):
        loss = step(batch)
        log.step()
        progress.step(number, loss=loss)
        if number == arguments.steps:
            return


def _pipeline_and_step(
    arguments: argparse.Namespace, make: Callable[[int], Any], workers: int
) -> tuple[Iterator[Any], Callable[[Any], float | None]]:
    if arguments.device == "none":
        return threaded_batches(make, workers), lambda _: time.sleep(WAIT_SECONDS[arguments.model])
    import torch
    from benchmarks.gpu.programs import models

    torch.set_num_threads(1)  # the pipeline's processes use the cores
    torch.backends.cudnn.benchmark = True
    source = models.batches(make, workers, arguments.device)  # forks its workers before there are threads, or CUDA
    echo = 1 if arguments.small else ECHO.get(arguments.model, 1)
    step = models.training_step(arguments.model, arguments.device, small=arguments.small, echo=echo)
    return source, step


if __name__ == "__main__":
    main()
