"""Speed by GPU type, and beside another job on the same GPU.

Measured: Gavel's throughputs (Narayanan et al., OSDI 2020) [D] on K80, P100 and V100, for 1, 2, 4 and 8 GPUs close
together or apart, and of pairs of jobs that share one GPU.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import median

from cotenant.core.model.model_name import Model, model_of
from cotenant.simulator.physics.models import bundled
from cotenant.simulator.physics.rounding import steady

TYPES = ("k80", "p100", "v100")
STAND_IN = "p100"  # for unmeasured types, if only neighbors or distance count: the middle one [R]


@lru_cache(maxsize=1024)
def known_type(gpu_type: str) -> str | None:
    """Return the measured type in the name of a GPU.

    >>> known_type("Tesla V100-SXM2-16GB"), known_type("A100")
    ('v100', None)
    """
    return next((known for known in TYPES if known in gpu_type.lower()), None)


@lru_cache(maxsize=4096)
def relative_speed(model: Model, gpus: float, gpu_type: str, reference_type: str) -> float | None:
    """Return a job's speed on one GPU type relative to another; None if it was not measured.

    >>> from cotenant.core.model.model_name import model_of
    >>> relative_speed(model_of("CycleGAN"), 1, "K80", "V100")
    0.114053321
    """
    here, there = known_type(gpu_type), known_type(reference_type)
    if here is None or there is None:
        return None
    if here == there:
        return 1.0
    for rates in _scales(model, gpus):
        mine, reference = rates[TYPES.index(here)][0], rates[TYPES.index(there)][0]
        if mine and reference:
            return steady(mine / reference)
    return None


@lru_cache(maxsize=4096)
def apart(model: Model, gpus: float, gpu_type: str) -> float | None:
    """Return a gang's relative speed when spread over servers; None if it was not measured.

    Some gangs were measured faster apart, which is treated as noise: the result is at most 1.
    """
    place = TYPES.index(known_type(gpu_type) or STAND_IN)
    for rates in _scales(model, gpus, measured=(2, 4, 8)):
        together, spread = rates[place]
        if together and spread:
            return steady(min(1.0, spread / together))
    return None


@lru_cache(maxsize=4096)
def beside(model: Model | None, other: Model | None, gpu_type: str) -> float:
    """Return a job's relative speed when it shares its GPU with another; at most 1.

    If one of the two was not measured, the median of the measured pairs on that GPU type is used [R]: 0.54 on a K80,
    0.59 on a P100, 0.68 on a V100.
    """
    table = bundled("gavel_speeds.json")
    kind = known_type(gpu_type) or STAND_IN
    mine, theirs = _name(model), _name(other)
    if mine is None or theirs is None:
        return _median_pair(kind)
    names = table["names"]
    left = table["pairs"][kind][names.index(mine)][names.index(theirs)]
    return _median_pair(kind) if left is None else min(1.0, float(left))


@lru_cache(maxsize=len(TYPES))
def _median_pair(kind: str) -> float:
    rows = bundled("gavel_speeds.json")["pairs"][kind]
    return float(median(left for row in rows for left in row if left is not None))


@lru_cache(maxsize=1)
def _batches() -> dict[str, dict[int, str]]:
    """Return the measured jobs by family and batch; 0 if the name has no batch."""
    batches: dict[str, dict[int, str]] = {}
    for name in bundled("gavel_speeds.json")["names"]:
        title, _, batch = name.partition("/")
        if model := model_of(title):
            batches.setdefault(model.family, {})[int(batch or 0)] = name
    return batches


@lru_cache(maxsize=1024)
def _name(model: Model | None) -> str | None:
    """Return the measured job with the nearest batch; without a batch, the middle one."""
    by_batch = _batches().get(model.family) if model else None
    if model is None or not by_batch:
        return None
    sizes = sorted(by_batch)
    if model.batch is None:
        return by_batch[sizes[len(sizes) // 2]]
    return by_batch[min(sizes, key=lambda size: (abs(math.log2(max(size, 1) / max(model.batch or 1, 1))), size))]


def _scales(model: Model, gpus: float, measured: tuple[int, ...] = (1, 2, 4, 8)) -> list[list[list[float | None]]]:
    """Return a job's rates by type, those with the nearest number of GPUs first."""
    name = _name(model)
    if name is None:
        return []
    by_scale = bundled("gavel_speeds.json")["steps_per_second"][name]
    scales = [scale for scale in measured if str(scale) in by_scale]
    scales.sort(key=lambda scale: (abs(math.log2(scale / max(gpus, 1))), scale))
    return [by_scale[str(scale)] for scale in scales]
