"""Which replica answers which call of a replicated service: the options of the methods in protos/.

Only the leader has what no record holds: reasons, positions, progress, streams, and the right to write. Records of
ended jobs no longer change, so any replica that follows the records can return them. Every replica answers for what it
holds itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from cotenant.codec.method_table import METHOD_RULES


class Route(Enum):
    """Which replica answers."""

    LEADER = "the leader, whichever replica is asked"
    ENDED = "any replica, of what has ended; else the leader"
    ANY = "the replica that is asked"
    NODE = "the replica that the node's name chooses"


ROUTES: Mapping[str, Route] = MappingProxyType({path: Route[rules.route] for path, rules in METHOD_RULES.items()})
