"""Addresses of services, as people write them."""

from __future__ import annotations

from dataclasses import dataclass

SERVICES = ("queue", "placement", "predictor", "contention")
PORT_MAX = 65_535
MESH_NAME = "mesh.cotenant"  # what all services' certificates are for, beside their own names


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where each service is; "" where that is not known. One address may serve all, and several may serve one."""

    queue: str = ""
    placement: str = ""
    predictor: str = ""
    contention: str = ""

    @classmethod
    def one(cls, address: str) -> Endpoints:
        """All services at one address."""
        return cls(address, address, address, address)

    @classmethod
    def parse(cls, text: str) -> Endpoints:
        """Read `host:port`, or `queue=host:port,placement=host:port,…`; replicas stand beside each other: `a:1|b:1`.

        >>> Endpoints.parse("127.0.0.1:7070").predictor
        '127.0.0.1:7070'
        >>> Endpoints.parse("queue=a:1|b:1,placement=b:2").queue
        'a:1|b:1'

        Raises:
            ValueError: a part names no service, or something is no address.
        """
        if "=" not in text:
            return cls.one(_address(text))
        parts = (part.partition("=") for part in text.split(","))
        named = {name.strip(): _address(address) for name, _, address in parts}
        if unknown := sorted(set(named) - set(SERVICES)):
            raise ValueError(f"{unknown[0]!r} is no service; {', '.join(SERVICES)} are")
        return cls(**named)


def addresses_of(endpoint: str) -> tuple[str, ...]:
    """Split what `Endpoints` says of a service into the addresses of its replicas.

    >>> addresses_of("a:1|[::1]:2")
    ('a:1', '[::1]:2')
    """
    return tuple(endpoint.split("|")) if endpoint else ()


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address; the brackets of an IPv6 host are taken off.

    >>> host_and_port("[::1]:7070")
    ('::1', 7070)

    Raises:
        ValueError: it is no `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ValueError(f"{address!r} is no address; write host:port, with a port up to {PORT_MAX}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _address(text: str) -> str:
    addresses = [address.strip() for address in text.split("|")]
    for address in addresses:
        host_and_port(address)
    return "|".join(dict.fromkeys(addresses))
