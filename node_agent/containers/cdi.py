"""Reads specs of the Container Device Interface, which say how a container gets a device.

A vendor's tool writes them, such as `nvidia-ctk cdi generate`. Each file describes one kind of device, such as
`nvidia.com/gpu`, with what all its devices need and what each adds: device nodes, mounts of the driver's libraries,
variables, and hooks for the runtime. Nothing of a file is executed here. Source: the CDI specification, version 1.0
(https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cotenant.deferred import json, yaml

HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
NODE_TYPES = ("b", "c", "u", "p")
NESTED_MAX = 20
_VERSION = re.compile(r"[01]\.\d{1,3}\.\d{1,3}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[^=\0]+=[^\0]*", re.DOTALL)


class BadCdiSpec(ValueError):
    """A file is no CDI spec, for this reason."""


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device file of a container; unset numbers are those of the file `source` of the node."""

    path: str
    source: str
    type: str = ""
    major: int | None = None
    minor: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class CdiMount:
    """A file or directory of the node that a container sees at `target`."""

    source: str
    target: str
    options: tuple[str, ...] = ()
    type: str = ""


@dataclass(frozen=True, slots=True)
class CdiHook:
    """A program that the runtime calls; `timeout_seconds` None: it may take as long as it likes."""

    name: str
    path: str
    arguments: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    timeout_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a container needs for its devices. `environment` has words NAME=VALUE."""

    environment: tuple[str, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    mounts: tuple[CdiMount, ...] = ()
    hooks: tuple[CdiHook, ...] = ()
    groups: tuple[int, ...] = ()

    def __add__(self, other: ContainerEdits) -> ContainerEdits:
        """Return the edits of both, each once, in order."""
        return ContainerEdits(*(
            tuple(dict.fromkeys((*getattr(self, name), *getattr(other, name)))) for name in self.__slots__
        ))  # fmt: skip


NO_EDITS = ContainerEdits()


@dataclass(frozen=True, slots=True)
class CdiSpec:
    """The devices of one kind: what all of them need, and what each adds, by name."""

    kind: str
    devices: Mapping[str, ContainerEdits] = field(default_factory=dict)
    common: ContainerEdits = NO_EDITS

    def edits(self, name: str) -> ContainerEdits:
        """Return all that a container needs for a device."""
        return self.common + self.devices[name]


def read_spec(data: bytes) -> CdiSpec:
    """Return the spec in a file of JSON or YAML.

    >>> spec = read_spec(b'''
    ... cdiVersion: 0.6.0
    ... kind: nvidia.com/gpu
    ... devices: [{name: "0", containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}]
    ... containerEdits: {env: [NVIDIA_VISIBLE_DEVICES=void]}
    ... ''')
    >>> spec.edits("0").devices[0].path, spec.edits("0").environment
    ('/dev/nvidia0', ('NVIDIA_VISIBLE_DEVICES=void',))

    Raises:
        BadCdiSpec: it is none.
    """
    found = _mapping(_parse(data), "the file")
    version, kind = _text(found, "cdiVersion", "the file"), _text(found, "kind", "the file")
    if not _VERSION.fullmatch(version):
        raise BadCdiSpec(f"its cdiVersion must be 0.x.y or 1.x.y, not {_shown(version)}")
    if not _KIND.fullmatch(kind):
        raise BadCdiSpec(f"its kind must be like nvidia.com/gpu, not {_shown(kind)}")
    devices: dict[str, ContainerEdits] = {}
    for index, each in enumerate(_list(found, "devices", "the file")):
        where = f"devices[{index}]"
        device = _mapping(each, where)
        name = _text(device, "name", where)
        if not _NAME.fullmatch(name):
            raise BadCdiSpec(f"{where}.name must be letters, digits and -_.:, not {_shown(name)}")
        if name in devices:
            raise BadCdiSpec(f"{where}.name: there is another device {name}")
        devices[name] = _edits(device.get("containerEdits"), f"{where}.containerEdits")
    if not devices:
        raise BadCdiSpec("it has no devices")
    return CdiSpec(kind, devices, _edits(found.get("containerEdits"), "containerEdits"))


def _parse(data: bytes) -> object:
    try:
        text = data.decode()
        if text.lstrip().startswith("{"):
            with suppress(json.JSONDecodeError):  # a YAML file may begin like that, too
                return json.loads(text)
        _check_nesting(text)
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except BadCdiSpec:
        raise
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadCdiSpec(f"{line}{error.problem or 'it is neither JSON nor YAML'}") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise BadCdiSpec(f"it is neither JSON nor YAML: {reason}") from None


def _check_nesting(text: str) -> None:
    """Raise `BadCdiSpec` for collections nested so deep that a parser would exhaust the stack."""
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > NESTED_MAX:
                raise BadCdiSpec(f"its collections are nested deeper than {NESTED_MAX}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _edits(value: object, where: str) -> ContainerEdits:
    if value is None:
        return NO_EDITS
    found = _mapping(value, where)
    return ContainerEdits(
        tuple(_variables(found, "env", where)),
        tuple(_device_node(each, f"{where}.deviceNodes[{i}]") for i, each in _each(found, "deviceNodes", where)),
        tuple(_mount(each, f"{where}.mounts[{i}]") for i, each in _each(found, "mounts", where)),
        tuple(_hook(each, f"{where}.hooks[{i}]") for i, each in _each(found, "hooks", where)),
        tuple(_id(each, f"{where}.additionalGids[{i}]") for i, each in _each(found, "additionalGids", where)),
    )


def _device_node(value: object, where: str) -> DeviceNode:
    found = _mapping(value, where)
    path = _path(found, "path", where)
    kind = _text(found, "type", where, "")
    if kind and kind not in NODE_TYPES:
        raise BadCdiSpec(f"{where}.type must be one of {', '.join(NODE_TYPES)}, not {_shown(kind)}")
    numbers = [_id(found[name], f"{where}.{name}") if found.get(name) is not None else None for name in (
        "major", "minor", "fileMode", "uid", "gid"
    )]  # fmt: skip
    return DeviceNode(path, _path(found, "hostPath", where, path), kind, *numbers)


def _mount(value: object, where: str) -> CdiMount:
    found = _mapping(value, where)
    options = tuple(_strings(found, "options", where))
    kind = _text(found, "type", where, "")
    return CdiMount(_path(found, "hostPath", where), _path(found, "containerPath", where), options, kind)


def _hook(value: object, where: str) -> CdiHook:
    found = _mapping(value, where)
    name = _text(found, "hookName", where)
    if name not in HOOKS:
        raise BadCdiSpec(f"{where}.hookName must be one of {', '.join(HOOKS)}, not {_shown(name)}")
    timeout = found.get("timeout")
    seconds = None if timeout is None else _id(timeout, f"{where}.timeout")
    arguments, variables = tuple(_strings(found, "args", where)), tuple(_variables(found, "env", where))
    return CdiHook(name, _path(found, "path", where), arguments, variables, seconds)


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise BadCdiSpec(f"{where} must be a mapping, not {_shown(value)}")
    return value


def _list(found: Mapping[str, Any], name: str, where: str) -> list[object]:
    value = found.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadCdiSpec(f"{name} of {where} must be a list, not {_shown(value)}")
    return value


def _each(found: Mapping[str, Any], name: str, where: str) -> Iterable[tuple[int, object]]:
    return enumerate(_list(found, name, where))


def _strings(found: Mapping[str, Any], name: str, where: str) -> list[str]:
    return [_string(each, f"{where}.{name}[{index}]") for index, each in _each(found, name, where)]


def _variables(found: Mapping[str, Any], name: str, where: str) -> list[str]:
    words = _strings(found, name, where)
    for word in words:
        if not _VARIABLE.fullmatch(word):
            raise BadCdiSpec(f"{where}.{name} must have words NAME=VALUE, not {_shown(word)}")
    return words


def _string(value: object, where: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise BadCdiSpec(f"{where} must be a text, not {_shown(value)}")
    return value


def _text(found: Mapping[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = found.get(name, default)
    if value is None:
        raise BadCdiSpec(f"{where} has no {name}")
    return _string(value, f"{name} of {where}")


def _path(found: Mapping[str, Any], name: str, where: str, default: str | None = None) -> str:
    path = _text(found, name, where, default)
    if not path.startswith("/") or ".." in path.split("/"):
        raise BadCdiSpec(f"{name} of {where} must be an absolute path without '..', not {_shown(path)}")
    return path


def _id(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise BadCdiSpec(f"{where} must be a number from 0, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):  # may be of any size, or contain itself
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a number beyond 64 bits"
    return text if len(text) <= 60 else f"{text[:57]}…"
