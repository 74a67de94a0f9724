"""Discovers policies through entry points. A broken policy is reported by name and skipped, never fatal.

A policy is a class with a `name`, `api_version = 1` and the methods of its group (`cotenant.core.policy.protocols`). A
policy with options declares them as a frozen dataclass `Options` inside it and takes an instance of that in its
constructor; a policy without `Options` takes no argument.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cotenant import extras
from cotenant.core.model.validation import Violation
from cotenant.core.policy import options as declared_options
from cotenant.core.policy.api_version import API_VERSION
from cotenant.core.policy.options import BadOption, InvalidOptionsClass
from cotenant.core.spelling import did_you_mean, nearest

__all__ = ["GROUPS", "POLICY_GROUPS", "SHORT_GROUPS", "BadOption", "Plugin", "UnknownPolicy", "discover", "load"]

OURS = "cotenant"

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {  # groups, and the methods that their policies must have
        "cotenant.queue_policies": ("order",),
        "cotenant.cpu_allocators": ("size",),
        "cotenant.placement_policies": ("place",),
        "cotenant.predictors": ("observe", "estimate", "dump", "restore"),
        "cotenant.contention_policies": ("judge",),
        "cotenant.runtimes": (
            *("open", "not_enforced", "launch", "stop", "adopt", "narrow", "usage", "output_directory", "forget"),
            "close",
        ),
    }
)
POLICY_GROUPS: Mapping[str, str] = MappingProxyType(
    {  # the groups of policies, as options of the command line name them
        "queue": "cotenant.queue_policies",
        "placement": "cotenant.placement_policies",
        "allocator": "cotenant.cpu_allocators",
        "predictor": "cotenant.predictors",
        "contention": "cotenant.contention_policies",
    }
)

SHORT_GROUPS: Mapping[str, str] = MappingProxyType(
    {**POLICY_GROUPS, "runtime": "cotenant.runtimes"}  # all groups: runtimes decide nothing
)


class UnknownPolicy(LookupError):
    """No usable policy of that name; the message says why, or names similar policies."""

    def __init__(self, group: str, name: str, why: str, near: Iterable[str] = ()) -> None:
        super().__init__(why)
        self.group, self.name, self.near = group, name, tuple(near)


@dataclass(frozen=True, slots=True)
class Plugin:
    """A policy found through an entry point; usable if `healthy`."""

    group: str
    name: str
    package: str
    version: str
    api_version: int = 0
    healthy: bool = False
    error: str = ""
    summary: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    policy: type | None = field(default=None, repr=False, compare=False)

    def make(self, options: Mapping[str, str] = MappingProxyType({})) -> Any:
        """Return the policy with these options; options not given keep their defaults.

        Raises:
            UnknownPolicy: the plug-in is broken.
            BadOption: names every invalid option, and the valid ones.
        """
        if self.policy is None:
            raise self._unusable(self.error)
        declared = getattr(self.policy, "Options", None)
        if declared is None and options:
            raise BadOption((Violation(name, "is not an option; this policy has none") for name in options), {})
        arguments = () if declared is None else (declared_options.parse(declared, options),)
        try:
            return self.policy(*arguments)
        except Exception as error:  # anything that a third-party constructor may raise
            raise self._unusable(f"cannot be created: {type(error).__name__}: {error}") from error

    def _unusable(self, why: str) -> UnknownPolicy:
        return UnknownPolicy(
            self.group,
            self.name,
            f"{_kind(self.group)} {self.name!r} of package {self.package} {self.version} cannot be used: {why}",
        )


def discover(group: str | None = None) -> list[Plugin]:
    """Return the policies of a group, or of all groups, by group and name, including broken ones."""
    if group is not None and group not in GROUPS:
        raise ValueError(f"unknown group {group!r}; groups are {', '.join(GROUPS)}")
    return [plugin for each in sorted(GROUPS) if group in (None, each) for plugin in _of_group(each)]


def load(group: str, name: str, options: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return the policy of that name. Only its own module is imported.

    Raises:
        UnknownPolicy: there is none, or it is broken.
        BadOption: names every invalid option, and the valid ones.
    """
    plugins = _examined(group, _named_points(group, name))
    return next((plugin for plugin in plugins if plugin.healthy), plugins[0]).make(options)


def check_installed(group: str, name: str) -> None:
    """Check that there is a policy of that name, without importing it.

    Raises:
        UnknownPolicy: there is none.
    """
    _named_points(group, name)


def _named_points(group: str, name: str) -> list[EntryPoint]:
    """Return the entry points of that name. Raises `UnknownPolicy` if there are none."""
    points = _installed(group)
    named = [point for point in points if point.name == name]
    if not named:
        known = sorted({point.name for point in points})
        raise UnknownPolicy(
            group,
            name,
            f"there is no {_kind(group)} {name!r}{did_you_mean(name, known)} (installed: {', '.join(known) or 'none'})",
            nearest(name, known),
        )
    return named


def _installed(group: str) -> EntryPoints:
    """Return a group's installed entry points."""
    return _all_installed(_places())[group]


@lru_cache(maxsize=1)
def _all_installed(places: tuple[tuple[str, int], ...]) -> Mapping[str, EntryPoints]:
    """Return the installed entry points by group; cached, because reading them takes longer than a cycle."""
    every = entry_points()
    return {group: every.select(group=group) for group in GROUPS}


def _places() -> tuple[tuple[str, int], ...]:
    """Return where packages may be, and when each place last changed."""
    return tuple([(place, _written_ns(Path(place))) for place in sys.path])


def _written_ns(place: Path) -> int:
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return -1  # missing or unreadable


def _of_group(group: str) -> list[Plugin]:
    by_name: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in _installed(group):
        by_name[point.name].append(point)
    return [plugin for name in sorted(by_name) for plugin in _examined(group, by_name[name])]


def _examined(group: str, points: list[EntryPoint]) -> list[Plugin]:
    """Return all entry points of one name, examined. If packages clash over a name, only our own policy is usable."""
    if len(points) == 1:
        return [_examine(group, points[0])]
    points = sorted(points, key=_package)
    claims = ", ".join(_package(point) for point in points)
    duplicate = f"{points[0].name!r} is claimed by more than one package: {claims}"
    return [_examine(group, point) if _package(point) == OURS else _broken(group, point, duplicate) for point in points]


def _examine(group: str, point: EntryPoint) -> Plugin:
    try:
        policy = point.load()
    except (Exception, SystemExit) as error:  # anything that a third-party module may raise on import
        return _broken(group, point, f"cannot be imported: {type(error).__name__}: {error}{_remedy(error)}")
    if wrong := _wrong(group, point.name, policy):
        return _broken(group, point, wrong, getattr(policy, "api_version", 0))
    try:
        declared = getattr(policy, "Options", None)
        options = declared_options.defaults(declared) if declared is not None else {}
    except (InvalidOptionsClass, ValueError) as error:
        return _broken(group, point, f"has invalid options: {error}", policy.api_version)
    return Plugin(
        group=group,
        name=point.name,
        package=_package(point),
        version=_version(point),
        api_version=policy.api_version,
        healthy=True,
        summary=next(iter((policy.__doc__ or "").strip().splitlines()), ""),
        options=options,
        policy=policy,
    )


def _remedy(error: BaseException) -> str:
    """Return how to install the module that an import lacks, if an extra of ours brings it."""
    extra = extras.bringing(error.name or "", ("agent", "server")) if isinstance(error, ModuleNotFoundError) else ""
    return f"; {extras.how_to_install(extra)}" if extra else ""


def _wrong(group: str, name: str, policy: Any) -> str:
    """Return why a loaded object is not a policy of the group; "" if it is one."""
    if not isinstance(policy, type):
        return f"is not a class but {policy!r:.80}"
    version = getattr(policy, "api_version", None)
    if version is None:
        return f"has no api_version; this Cotenant supports version {API_VERSION}"
    if version != API_VERSION:
        return f"uses version {version!r} of the policy API; this Cotenant supports version {API_VERSION}"
    if getattr(policy, "name", None) != name:
        return f"is installed as {name!r} but calls itself {getattr(policy, 'name', None)!r}"
    lacking = [method for method in GROUPS[group] if not callable(getattr(policy, method, None))]
    return f"lacks {', '.join(f'{method}()' for method in lacking)}" if lacking else ""


def _broken(group: str, point: EntryPoint, error: str, api_version: object = 0) -> Plugin:
    return Plugin(
        group=group,
        name=point.name,
        package=_package(point),
        version=_version(point),
        api_version=api_version if isinstance(api_version, int) else 0,
        error=error,
    )


def _package(point: EntryPoint) -> str:
    return _named(point.dist)[0] if point.dist else ""


def _version(point: EntryPoint) -> str:
    return _named(point.dist)[1] if point.dist else ""


@lru_cache(maxsize=64)
def _named(package: Distribution) -> tuple[str, str]:
    """Return a package's name and version, cached; a package that was half removed has no file with them."""
    told = package.metadata
    return (told["Name"], told["Version"]) if "Name" in told else ("a package without a name", "")


def _kind(group: str) -> str:
    """Return the singular of a group: `queue policy`."""
    words = group.rpartition(".")[2].replace("_", " ")
    return f"{words.removesuffix('ies')}y" if words.endswith("ies") else words.removesuffix("s")
