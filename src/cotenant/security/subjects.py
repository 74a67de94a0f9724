"""Subjects of certificates and tokens, as users write them: `agent/gpu1`, `user/eve?tenants=a,b`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlsplit

from cotenant.security.identity import NAME, Identity, check_name
from cotenant.security.permissions import Role

SCHEME = "cotenant"
EVERY_TENANT = "*"
MESH_ROLES = frozenset({Role.AGENT, Role.SERVICE})
_TENANT = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Subject:
    """A role and a name; for people also the tenants, None means all."""

    role: Role
    name: str
    tenants: frozenset[str] | None = frozenset()

    def __post_init__(self) -> None:
        """Raises ValueError if the subject is invalid."""
        own = self.role in MESH_ROLES and NAME.fullmatch(self.name)  # such a name follows its role
        if wrong := "" if own else check_name(self.name):
            raise ValueError(f"{self.role}: {wrong}")
        if odd := sorted(one for one in self.tenants or () if not _TENANT.fullmatch(one)):
            raise ValueError(f"{odd[0]!r} is not a valid tenant name")
        if self.role in (Role.VIEWER, Role.USER, Role.TENANT_ADMIN) and self.tenants == frozenset():
            raise ValueError(f"a {self.role} needs tenants: name them, or {EVERY_TENANT} for all")

    @classmethod
    def parse(cls, text: str, tenants: str = "") -> Subject:
        """Parse `ROLE/NAME`, with tenants in `?tenants=` or in the second argument.

        >>> Subject.parse("user/eve?tenants=b,a").uri
        'cotenant://user/eve?tenants=a,b'
        >>> Subject.parse("agent/gpu1").identity.node
        'gpu1'

        Raises:
            ValueError: the role or the name is invalid.
        """
        path, _, query = text.partition("?")
        role, slash, name = path.partition("/")
        if role not in set(Role) or not slash:
            raise ValueError(f"{text!r} is not ROLE/NAME; the roles are {', '.join(Role)}")
        asked = tenants or ",".join(parse_qs(query).get("tenants", []))
        return cls(Role(role), unquote(name), tenants_of(asked, Role(role)))

    @classmethod
    def of_uri(cls, uri: str) -> Subject | None:
        """Parse the URI of a certificate; return None if it is not one of ours.

        Raises:
            ValueError: the subject is invalid.
        """
        parts = urlsplit(uri)
        if parts.scheme != SCHEME:
            return None
        return cls.parse(f"{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else ""))

    @property
    def serves(self) -> bool:
        """Whether a server may show its certificate."""
        return self.role is Role.SERVICE

    @property
    def uri(self) -> str:
        """The URI of the subject in certificates."""
        told = "" if self.role in MESH_ROLES | {Role.OPERATOR} else f"?tenants={tenants_text(self.tenants)}"
        return f"{SCHEME}://{self.role}/{quote(self.name, safe='@+')}{told}"

    @property
    def file_stem(self) -> str:
        """The stem of its files' names."""
        return re.sub(r"[^A-Za-z0-9_.@+-]", "-", f"{self.role}-{self.name}")

    @property
    def identity(self) -> Identity:
        """The identity of a caller with this subject."""
        name = f"{self.role}/{self.name}" if self.role in MESH_ROLES else self.name
        node = self.name if self.role is Role.AGENT else ""
        return Identity(name, frozenset({self.role}), self.tenants, node)

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


def tenants_of(text: str, role: Role) -> frozenset[str] | None:
    """Parse comma-separated tenants; `*` means all, as does no tenant for an operator or a service."""
    names = frozenset(one.strip() for one in text.split(",") if one.strip())
    if EVERY_TENANT in names or (not names and role in (Role.OPERATOR, Role.SERVICE)):
        return None
    return names


def tenants_text(tenants: frozenset[str] | None) -> str:
    """Return tenants as comma-separated text."""
    return EVERY_TENANT if tenants is None else ",".join(sorted(tenants))
