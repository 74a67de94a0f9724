"""No contention control."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.policy.protocols import Directive, NodeWindow


class NoContention:
    """Ignore contention: jobs are never throttled.

    No paper: a baseline for comparisons.

    >>> NoContention().judge(NodeWindow("n1", now=0, seconds=5, attempts=(), cpu_some_percent=99))
    ()
    """

    name = "none"
    api_version = 1

    def judge(self, window: NodeWindow) -> Sequence[Directive]:
        """Return no directives."""
        return ()
