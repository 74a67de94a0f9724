"""The cost of stopping and restarting a job, by model.

Measured range: 0.2 to 5.4 s to save a checkpoint, 4 to 94 s to restart from it (AITurbo's lab [D]). Both grow with what
must be written, read and built, so they are set by the number of parameters, linear in its logarithm from 1 million to
340 million (BERT large) [R]. An unknown model gets the geometric middle of each range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cotenant.core.model.model_name import Model
from cotenant.simulator.physics.rounding import steady

SAVE_SECONDS = (0.2, 5.4)
RESTART_SECONDS = (4.0, 94.0)
MILLIONS_RANGE = (1.0, 340.0)
MILLIONS = {  # of parameters, as counted in the models' papers; for some, of the most common size
    "resnet50": 25.6,
    "resnet18": 11.7,
    "resnet": 44.5,
    "alexnet": 61.0,
    "mobilenet": 4.2,
    "shufflenet": 2.3,
    "googlenet": 6.8,
    "inception": 23.8,
    "overfeat": 145.0,
    "lenet": 0.06,
    "vgg": 138.0,
    "yolo": 62.0,
    "densenet": 8.0,
    "squeezenet": 1.2,
    "cyclegan": 28.3,
    "vae": 1.0,
    "deepspeech": 38.0,
    "m5": 0.6,
    "wavenet": 4.6,
    "bert": 340.0,
    "gnmt": 210.0,
    "gpt": 124.0,
    "transformer": 65.0,
    "bidaf": 2.6,
    "lstm": 20.0,
    "a3c": 1.0,
    "recommendation": 12.0,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds to save a job's state, and to restart from it."""

    save_seconds: float
    restart_seconds: float


@lru_cache(maxsize=256)
def cost(model: Model | None) -> Cost:
    """Return the cost of stopping and starting a job.

    >>> from cotenant.core.model.model_name import model_of
    >>> cost(model_of("bert")), cost(model_of("lenet"))
    (Cost(save_seconds=5.4, restart_seconds=94.0), Cost(save_seconds=0.2, restart_seconds=4.0))
    """
    least, most = MILLIONS_RANGE
    if model is None:
        size = 0.5
    else:
        millions = min(most, max(least, MILLIONS[model.family]))
        size = math.log(millions / least) / math.log(most / least)
    return Cost(_at(SAVE_SECONDS, size, middle=model is None), _at(RESTART_SECONDS, size, middle=model is None))


def _at(seconds: tuple[float, float], size: float, *, middle: bool) -> float:
    least, most = seconds
    return steady(math.sqrt(least * most) if middle else least + (most - least) * size)
