"""Addresses of services, as users write them."""

from __future__ import annotations

from typing import NamedTuple

SERVICES = ("queue", "placement", "predictor", "contention")
PORT_MAX = 65_535
TO = "cotenant-to"  # metadata: the process that shall answer: a service, or the address of a replica
MESH_NAME = "mesh.cotenant"  # every service certificate has this name, beside its own


class Endpoints(NamedTuple):
    """The address of each service, "" if unknown. One address may serve all services, and several may serve one."""

    queue: str = ""
    placement: str = ""
    predictor: str = ""
    contention: str = ""

    @classmethod
    def one(cls, address: str) -> Endpoints:
        """Return endpoints with all services at one address."""
        return cls(address, address, address, address)

    @classmethod
    def parse(cls, text: str) -> Endpoints:
        """Parse `host:port`, or `queue=host:port,placement=host:port,…`; replicas are separated by `|`: `a:1|b:1`.

        >>> Endpoints.parse("127.0.0.1:7070").predictor
        '127.0.0.1:7070'
        >>> Endpoints.parse("queue=a:1|b:1,placement=b:2").queue
        'a:1|b:1'

        Raises:
            ValueError: a part names an unknown service, or an address is invalid.
        """
        if "=" not in text:
            return cls.one(_address(text))
        parts = (part.partition("=") for part in text.split(","))
        named = {name.strip(): _address(address) for name, _, address in parts}
        if unknown := sorted(set(named) - set(SERVICES)):
            raise ValueError(f"unknown service {unknown[0]!r}; the services are {', '.join(SERVICES)}")
        return cls(**named)


NO_ENDPOINTS = Endpoints()


def addresses_of(endpoint: str) -> tuple[str, ...]:
    """Return the addresses of a service's replicas from its endpoint.

    >>> addresses_of("a:1|[::1]:2")
    ('a:1', '[::1]:2')
    """
    return tuple(endpoint.split("|")) if endpoint else ()


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address; the brackets of an IPv6 host are removed.

    >>> host_and_port("[::1]:7070")
    ('::1', 7070)

    Raises:
        ValueError: the address is not `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError(f"invalid address {address!r}; write host:port, with a port up to {PORT_MAX}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _address(text: str) -> str:
    addresses = [address.strip() for address in text.split("|")]
    for address in addresses:
        host_and_port(address)
    return "|".join(dict.fromkeys(addresses))
