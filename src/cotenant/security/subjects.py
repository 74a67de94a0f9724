"""Who bears a certificate or a token, as people write it: `agent/gpu1`, `user/eve?tenants=a,b`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlsplit

from cotenant.security.identity import NAME, Identity, check_name
from cotenant.security.permissions import Role

SCHEME = "cotenant"
EVERY_TENANT = "*"
OF_THE_MESH = frozenset({Role.AGENT, Role.SERVICE})
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Bearer:
    """A role and a name; for people also the tenants, None standing for all."""

    role: Role
    name: str
    tenants: frozenset[str] | None = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError where such a bearer cannot be."""
        own = self.role in OF_THE_MESH and NAME.fullmatch(self.name)  # such a name stands behind its role
        if wrong := "" if own else check_name(self.name):
            raise ValueError(f"{self.role}: {wrong}")
        if odd := sorted(one for one in self.tenants or () if not _TENANT.fullmatch(one)):
            raise ValueError(f"{odd[0]!r} is no tenant's name")
        if self.role in (Role.VIEWER, Role.USER, Role.TENANT_ADMIN) and self.tenants == frozenset():
            raise ValueError(f"a {self.role} has tenants: name them, or {EVERY_TENANT} for all")

    @classmethod
    def parse(cls, text: str, tenants: str = "") -> Bearer:
        """Read `ROLE/NAME`, with tenants behind `?tenants=` or apart.

        >>> Bearer.parse("user/eve?tenants=b,a").uri
        'cotenant://user/eve?tenants=a,b'
        >>> Bearer.parse("agent/gpu1").identity.node
        'gpu1'

        Raises:
            ValueError: it is no role, or no name.
        """
        path, _, query = text.partition("?")
        role, slash, name = path.partition("/")
        if role not in set(Role) or not slash:
            raise ValueError(f"{text!r} is not ROLE/NAME; the roles are {', '.join(Role)}")
        asked = tenants or ",".join(parse_qs(query).get("tenants", []))
        return cls(Role(role), unquote(name), tenants_of(asked, Role(role)))

    @classmethod
    def of_uri(cls, uri: str) -> Bearer | None:
        """Read what a certificate says; None where it says nothing of ours.

        Raises:
            ValueError: it says something that cannot be.
        """
        parts = urlsplit(uri)
        if parts.scheme != SCHEME:
            return None
        return cls.parse(f"{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else ""))

    @property
    def serves(self) -> bool:
        """Whether its certificate may be shown by a server."""
        return self.role is Role.SERVICE

    @property
    def uri(self) -> str:
        """How a certificate names it."""
        told = "" if self.role in OF_THE_MESH | {Role.OPERATOR} else f"?tenants={tenants_in_words(self.tenants)}"
        return f"{SCHEME}://{self.role}/{quote(self.name, safe='@+')}{told}"

    @property
    def file_stem(self) -> str:
        """The name of its files."""
        return re.sub(r"[^A-Za-z0-9_.@+-]", "-", f"{self.role}-{self.name}")

    @property
    def identity(self) -> Identity:
        """The caller that it is."""
        name = f"{self.role}/{self.name}" if self.role in OF_THE_MESH else self.name
        node = self.name if self.role is Role.AGENT else ""
        return Identity(name, frozenset({self.role}), self.tenants, node)

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def tenants_of(text: str, role: Role) -> frozenset[str] | None:
    """Read tenants with commas between them; `*`, and an operator or a service without any, stand for all."""
    names = frozenset(one.strip() for one in text.split(",") if one.strip())
    if EVERY_TENANT in names or (not names and role in (Role.OPERATOR, Role.SERVICE)):
        return None
    return names


def tenants_in_words(tenants: frozenset[str] | None) -> str:
    """Write tenants."""
    return EVERY_TENANT if tenants is None else ",".join(sorted(tenants))
