"""Libraries that are imported when they are first used, because a command that does without them is several times
as fast: `from cotenant.deferred import grpc` costs nothing until `grpc.StatusCode` is evaluated.

Only for the names here, and only where a whole module would otherwise be loaded for an `except` clause, an annotation
or a rare branch; a function that always needs a library imports it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "Deferred",
    "asyncio",
    "defer_pure_protobuf",
    "error_details_pb2",
    "grpc",
    "ipaddress",
    "json",
    "secrets",
    "status_pb2",
    "tempfile",
    "tomllib",
    "yaml",
]

PURE_PROTOBUF = "google.protobuf.internal.python_message"


class Deferred(ModuleType):
    """A module that is imported, with the named submodules, at the first access to one of its attributes."""

    def __init__(self, name: str, *submodules: str) -> None:
        super().__init__(name)
        self._names = (name, *submodules)

    def __getattr__(self, attribute: str) -> Any:
        module, *_ = [import_module(name) for name in self._names]
        value = getattr(module, attribute)
        setattr(self, attribute, value)
        return value


class _Replaced(ModuleType):
    """A module of another library, which is imported at the first access to one of its attributes."""

    def __getattr__(self, attribute: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), attribute)


def defer_pure_protobuf() -> None:
    """Defer the import of protobuf's implementation in Python, which takes as long as starting Python.

    Protobuf imports it even if it uses the one in C. To be called before anything imports a message.
    """
    sys.modules.setdefault(PURE_PROTOBUF, _Replaced(PURE_PROTOBUF))


if TYPE_CHECKING:
    import asyncio
    import ipaddress
    import json
    import secrets
    import tempfile
    import tomllib

    import grpc
    import grpc.aio
    import yaml
    from google.rpc import error_details_pb2, status_pb2
else:
    asyncio = Deferred("asyncio")
    error_details_pb2 = Deferred("google.rpc.error_details_pb2")
    grpc = Deferred("grpc", "grpc.aio")
    ipaddress = Deferred("ipaddress")
    json = Deferred("json")
    secrets = Deferred("secrets")
    status_pb2 = Deferred("google.rpc.status_pb2")
    tempfile = Deferred("tempfile")
    tomllib = Deferred("tomllib")
    yaml = Deferred("yaml")
