"""Training and inference jobs are never hurt by CPU jobs on their node: CODA's contention eliminator."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.policy.protocols import Directive, NodeWindow
from cotenant.policies.coda_eliminator.relief import Relief
from cotenant.policies.coda_eliminator.thresholds import Limits

NODES_SILENT_SECONDS = 900.0


class CodaEliminator:
    """Hold back the CPU job that slows a training or inference job down, for as long and as far as that helps.

    The real-time contention eliminator of CODA (Zhao et al., ICDCS 2020 [P]); its thresholds and its ladder are our
    reconstruction [R]. A victim is a job with GPUs that is below its own baseline, by more than 5 % and more than noise
    explains, while something on the node is short, or a CPU job has just begun to use much more. The CPU job whose use
    rose when the victim fell is held back on trial; what helps is kept, what does not is given back, and the next one
    is tried. Memory bandwidth is taken first where the hardware can do that, else cores; then the job is suspended, for
    a few minutes at most, and asked to move away. After a calm minute one rung is given back.

    >>> from cotenant.core.policy.protocols import AttemptWindow
    >>> policy, said = CodaEliminator(), []
    >>> for number in range(24):
    ...     hurt = number >= 20
    ...     training = AttemptWindow("dnn", 1, False, cores_used=8, rate_per_second=6.0 if hurt else 10.0, cores=8)
    ...     other = AttemptWindow("hog", 1, True, cores_used=8 if hurt else 0, cores=8)
    ...     said += policy.judge(NodeWindow("n1", 5.0 * number, 5, (training, other)))
    >>> said[0].job_id, said[0].throttle.cores, said[0].victim_job_id, round(said[0].victim_slowdown, 2)
    ('hog', 1, 'dnn', 0.4)
    """

    name = "coda-eliminator"
    api_version = 1

    Options = Limits

    def __init__(self, options: Limits | None = None) -> None:
        self.options = options or Limits()
        self._nodes: dict[str, Relief] = {}  # the one that was heard of last is the last

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Say who is to be held back on a node from now on, and who is to get something back."""
        relief = self._nodes.pop(window.node_id, None) or Relief(self.options)
        said = relief.judge(window)
        self._nodes[window.node_id] = relief
        oldest = next(iter(self._nodes))
        if window.now - self._nodes[oldest].watch.last > NODES_SILENT_SECONDS:
            del self._nodes[oldest]
        return said
