"""`models=synergy|gavel|muri`: the model that each job trains, from published profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind
from cotenant.simulator.overlays.port import Setting, one_of, picks
from cotenant.simulator.traces import TraceJob
from cotenant.simulator.traces.gavel import steps_per_second

# The classes of Synergy's published replay trace, `6_3_1`: image 60 %, language 30 %, speech 10 %; in it the models of
# a class are about equally frequent (OSDI'22 [D]). Each weight is that of a model.
SYNERGY: Mapping[str, float] = {
    "alexnet": 12,
    "deepspeech": 10,
    "gnmt": 10,
    "lstm": 10,
    "mobilenet": 12,
    "res18": 12,
    "res50": 12,
    "shufflenet": 12,
    "transformer": 10,
}
# The eight models of Muri's traces, drawn uniformly there (SIGCOMM'22 [D]).
MURI: Mapping[str, float] = dict.fromkeys(
    ("a2c", "bert", "dqn", "gpt2", "resnet18", "shufflenet_v2_x1_0", "vgg16", "vgg19"), 1
)


@dataclass(frozen=True, slots=True)
class Models:
    """Draws a model for each job with GPUs, independent of everything else about the job [R].

    `synergy` and `muri` use the shares of their published traces; `gavel` draws uniformly among its job types, as its
    generator does (OSDI'20 [D]), for a gang only among those that were measured on several GPUs. The work stays that of
    the trace.
    """

    key: ClassVar[str] = "models"
    form: ClassVar[str] = "synergy|gavel|muri"
    source: str

    @classmethod
    def parse(cls, value: str) -> Models:
        """Parse the source of the models."""
        return cls(one_of(value, ("synergy", "gavel", "muri")))

    def apply(self, jobs: Sequence[TraceJob], setting: Setting, rng: np.random.Generator) -> list[TraceJob]:
        """Draw the models."""
        single, gang = (_gavel(1), _gavel(2)) if self.source == "gavel" else (self._weights(), self._weights())
        for_one, for_gangs = (list(weights) for weights in (single, gang))
        state = rng.bit_generator.state
        of_one = picks(rng, len(jobs), list(single.values()))
        rng.bit_generator.state = state  # the same random numbers for both lists
        of_gangs = picks(rng, len(jobs), list(gang.values()))
        return [
            job
            if job.kind is JobKind.CPU
            else replace(job, model=for_one[of_one[at]] if _gpus(job) <= 1 else for_gangs[of_gangs[at]])
            for at, job in enumerate(jobs)
        ]

    def _weights(self) -> Mapping[str, float]:
        return SYNERGY if self.source == "synergy" else MURI


def _gavel(gpus: int) -> Mapping[str, float]:
    return {name: 1 for name, count in sorted(steps_per_second()) if count == gpus}


def _gpus(job: TraceJob) -> float:
    return sum(role.replicas * role.request.gpu_milli for role in job.roles) / WHOLE_GPU_MILLI
