"""Speed by cores: a job with too few cores starves its GPUs.

Measured: Synergy's profiles (Mohan et al., OSDI 2022) by model, GPUs, cores and memory per GPU [D], linear between
measured points. For models without a profile, Xiao's form (SoCC 2018 [P]): S(C) = P₀·ln C + P₁·C below the sweet spot θ
and constant from there on; θ of eight models is Xiao's [P], that of other models by the kind of their work [R]. P₀ and
P₁ are least-squares fits to Synergy's curves below their sweet spots [C]. All speeds are relative to 3 cores and 62.5
GB per GPU.
"""

from __future__ import annotations

import math
from functools import lru_cache

from cotenant.core.model.model_name import Model
from cotenant.simulator.physics.models import bundled
from cotenant.simulator.physics.rounding import between, steady

REFERENCE_CORES = 3.0
REFERENCE_MEMORY_GB = 62.5
_GB = 1e9

_SWEET_CORES = {  # Xiao, for the best speed on one P100 of a machine with 24 cores [P]
    "lenet": 20.0,
    "alexnet": 19.0,
    "overfeat": 22.0,
    "googlenet": 11.0,
    "lstm": 1.0,
    "bidaf": 8.0,
    "deepspeech": 3.0,
    "wavenet": 3.0,
}
_SWEET_CORES_OF_KIND = {"vision": 6.0, "speech": 3.0, "language": 2.0}  # CODA's starting points [R]
_CURVE_OF_KIND = {"vision": (0.536, 0.122), "speech": (0.090, 0.300), "language": (0.0, 1.0)}  # P₀, P₁ [C]
_NEEDS_ONE = frozenset({"bert", "gpt"})  # constant from one core on, as all of Synergy's language models are [D]


def speed(model: Model, *, gpus: float, cores_per_gpu: float, memory_bytes_per_gpu: float = 0.0) -> float | None:
    """Return a job's relative speed on this many cores; None if its model is unknown.

    0 bytes of memory means unknown, and counts as the reference.

    >>> from cotenant.core.model.model_name import model_of
    >>> speed(model_of("res50"), gpus=1, cores_per_gpu=1), speed(model_of("res50"), gpus=1, cores_per_gpu=12)
    (0.4, 1.15)
    """
    memory_gb = memory_bytes_per_gpu / _GB if memory_bytes_per_gpu else REFERENCE_MEMORY_GB
    return _speed(model.family, model.kind, gpus, cores_per_gpu, memory_gb)


@lru_cache(maxsize=4096)
def useful(model: Model, *, gpus: float, most: int) -> int | None:
    """Return how many cores a GPU's share of a job can use, up to `most`; None if its model is unknown.

    >>> from cotenant.core.model.model_name import model_of
    >>> useful(model_of("res50"), gpus=1, most=24), useful(model_of("lenet"), gpus=1, most=12)
    (4, 12)
    """
    rates = [speed(model, gpus=gpus, cores_per_gpu=cores) for cores in range(1, most + 1)]
    known = [rate for rate in rates if rate is not None]
    return 1 + next(number for number, rate in enumerate(known) if rate >= max(known) - 1e-9) if known else None


@lru_cache(maxsize=65536)
def _speed(family: str, kind: str, gpus: float, cores: float, memory_gb: float) -> float | None:
    table = bundled("synergy_cores.json")
    family_in_table = {"resnet18": "res18", "resnet50": "res50"}.get(family, family)
    if by_gpus := table["models"].get(family_in_table):
        return steady(_measured(by_gpus, gpus, cores, memory_gb))
    if kind not in _CURVE_OF_KIND:
        return None
    sweet = 1.0 if family in _NEEDS_ONE else _SWEET_CORES.get(family, _SWEET_CORES_OF_KIND[kind])
    return steady(_fitted(kind, sweet, cores) / _fitted(kind, sweet, REFERENCE_CORES))


def _measured(by_gpus: dict[str, list[list[float]]], gpus: float, cores: float, memory_gb: float) -> float:
    """Interpolate in the table for the largest number of GPUs that is at most the job's."""
    table = bundled("synergy_cores.json")
    counts = sorted(map(int, by_gpus))
    rows = by_gpus[str(max((count for count in counts if count <= gpus), default=counts[0]))]
    sizes = table["memory_gb"][-len(rows[0]) :]
    points = tuple(
        (float(count), between(tuple(zip(sizes, row, strict=True)), memory_gb))
        for count, row in zip(table["cores"], rows, strict=True)
        if all(row)  # 0 is impossible: the measured machine had no more cores
    )
    return between(((0.0, 0.0), *points), cores)


def _fitted(kind: str, sweet_cores: float, cores: float) -> float:
    """Return Xiao's form; below one core the speed is proportional."""
    p0, p1 = _CURVE_OF_KIND[kind]
    at = min(cores, sweet_cores)
    return p1 * at if at < 1 else p0 * math.log(at) + p1 * at
