"""The pre-run of a multi-GPU job: one replica alone on one GPU, before its gang is assembled.

Many failures in a cluster happen within the first minutes, because of a typo or a missing module, and would happen on
one GPU as well: "run a job on a single GPU first" is the third guideline of Jeon et al. (ATC 2019, section 5 [P]).
"""

from __future__ import annotations

import math
from dataclasses import replace

from cotenant.core.model.job import NO_SPREAD, WHOLE_GPU_MILLI, JobSpec, Request
from cotenant.core.model.refusal import about


def pre_run_of(spec: JobSpec) -> JobSpec:
    """Return the pre-run of a job: one replica with one GPU, or with its share if its replicas share GPUs.

    It is the first replica of the first role that has GPUs: rank 0, unless servers without GPUs come first. It gets
    that replica's cores per GPU, rounded up, and all of its memory, because the memory needed per GPU is unknown.
    """
    role = next((one for one in spec.roles if one.request.gpu_milli), spec.roles[0])
    return replace(
        spec,
        roles=(replace(role, replicas=1, request=_on_one_gpu(role.request), open=None),),
        locality=None,
        spread=NO_SPREAD,
        array=None,
    )


def _on_one_gpu(request: Request) -> Request:
    if request.gpu_milli <= WHOLE_GPU_MILLI:
        return request
    cores = None if request.cores is None else max(1, math.ceil(request.cores * WHOLE_GPU_MILLI / request.gpu_milli))
    return replace(request, gpu_milli=WHOLE_GPU_MILLI, cores=cores)


def in_words(seconds: float) -> str:
    """Describe a pre-run for users.

    >>> in_words(300)
    'a pre-run on one GPU, for 5 min at most'
    """
    return f"a pre-run on one GPU, for {about(seconds)} at most"
