"""The ports on which gangs meet: no two attempts that run get the same port of one host.

A gang's rank 0 listens on its master port, and in a gang with parameter servers replica r on that port + r, each on its
own host (`TF_CONFIG`). Nodes may share a host, and so its ports.
"""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.services.placement.cluster.live_records import LiveAttempt

MASTER_PORTS = range(29500, 30000)


class RendezvousPorts:
    """The ports that attempts may listen on, by the address of the host."""

    def __init__(self) -> None:
        self._ports: dict[str, dict[str, tuple[LiveAttempt, frozenset[int]]]] = {}  # by address and job
        self._addresses: dict[str, set[str]] = {}  # by job

    def add(self, live: LiveAttempt, hosts: Sequence[str]) -> None:
        """Add an attempt's ports; `hosts` are the addresses of its listening replicas, by rank."""
        self._addresses[live.key[0]] = set(hosts)
        for host in set(hosts):
            ports = frozenset(live.attempt.master_port + rank for rank, other in enumerate(hosts) if other == host)
            self._ports.setdefault(host, {})[live.key[0]] = live, ports

    def forget(self, job_id: str) -> None:
        """Drop the ports of a job's attempt."""
        for address in self._addresses.pop(job_id, ()):
            self._ports[address].pop(job_id)
            if not self._ports[address]:
                del self._ports[address]

    def first_free(self, hosts: Sequence[str]) -> int:
        """Return the first port of the range from which all listening replicas find their ports free."""
        taken = {host: self._taken(host) for host in set(hosts)}
        free = (
            port
            for port in MASTER_PORTS
            if all(port + rank not in taken[host] and port + rank in MASTER_PORTS for rank, host in enumerate(hosts))
        )
        return next(free, MASTER_PORTS[0])

    def _taken(self, address: str) -> set[int]:
        entries = self._ports.get(address, {}).values()
        return {port for live, ports in entries if not live.state.ended for port in ports}
