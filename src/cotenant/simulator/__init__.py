"""The simulator: replays a trace through the same core and policies as the live mesh, under a virtual clock.

>>> from cotenant.simulator import simulate
>>> result = simulate("sample", "2x8", queue="fifo", placement="consolidate")
>>> result.jobs, result.finished
(260, 260)
"""

from cotenant.simulator.clusters.cluster import BadCluster, Cluster
from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.results import Outcome, Result
from cotenant.simulator.run import simulate
from cotenant.simulator.traces import BadRow, BadTrace, Trace, TraceJob, load

__all__ = [
    "BadCluster",
    "BadRow",
    "BadTrace",
    "Cluster",
    "Outcome",
    "PolicyFailed",
    "Result",
    "Trace",
    "TraceJob",
    "load",
    "parse_cluster",
    "simulate",
]
