"""Protects training and inference jobs from CPU jobs on their node: CODA's contention eliminator."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.policy.protocols import Directive, NodeWindow
from cotenant.policies.coda_eliminator.relief import Relief
from cotenant.policies.coda_eliminator.thresholds import Thresholds

NODES_SILENT_SECONDS = 900.0


class CodaEliminator:
    """Throttle the CPU job that slows down a training or inference job, as long and as far as that helps.

    The real-time contention eliminator of CODA (Zhao et al., ICDCS 2020 [P]); its thresholds and its ladder are our
    reconstruction [R]. A victim is a job with GPUs that is below its own baseline, by more than 5 % and more than noise
    explains, while a resource of the node is short, or a CPU job has just begun to use much more. The CPU job whose use
    rose when the victim fell is throttled on trial; a throttle that helps is kept, otherwise it is removed, and the
    next suspect is tried. Memory bandwidth is limited first if the hardware can do that, else cores; then the job is
    suspended, for a few minutes at most, and asked to move away. After a calm minute the throttle is relaxed by one
    rung.

    >>> from cotenant.core.policy.protocols import AttemptWindow
    >>> policy, directives = CodaEliminator(), []
    >>> for number in range(24):
    ...     slow = number >= 20
    ...     training = AttemptWindow("dnn", 1, False, cores_used=8, rate_per_second=6.0 if slow else 10.0, cores=8)
    ...     other = AttemptWindow("hog", 1, True, cores_used=8 if slow else 0, cores=8)
    ...     directives += policy.judge(NodeWindow("n1", 5.0 * number, 5, (training, other)))
    >>> first = directives[0]
    >>> first.job_id, first.throttle.cores, first.victim_job_id, round(first.victim_slowdown, 2)
    ('hog', 1, 'dnn', 0.4)
    """

    name = "coda-eliminator"
    api_version = 1

    Options = Thresholds

    def __init__(self, options: Thresholds | None = None) -> None:
        self.options = options or Thresholds()
        self._nodes: dict[str, Relief] = {}  # the most recently seen node comes last

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Return the attempts to throttle on a node, and those to relax."""
        relief = self._nodes.pop(window.node_id, None) or Relief(self.options)
        directives = relief.judge(window)
        self._nodes[window.node_id] = relief
        oldest = next(iter(self._nodes))
        if window.now - self._nodes[oldest].state.last > NODES_SILENT_SECONDS:
            del self._nodes[oldest]
        return directives
