"""What `up` and `serve` are told: options of policies, a configuration file, this machine's nodes."""

from __future__ import annotations

import math
import os
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant.cli.mesh.security_options import SECTIONS, wrong_sections
from cotenant.cli.outcome import usage
from cotenant.core.policy.options import BadOption, names_of, parse, written
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:
    from cotenant.core.failures.launch_health import HoldRules
    from cotenant.core.failures.retry import RetryRules
    from cotenant.core.scheduling.admission import Rules
    from cotenant.store.capacity import StoreLimits

ARCHIVE_FILE = "archive.sqlite"
GROUPS = ("queue", "placement", "allocator", "predictor", "contention")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a configuration file may say of the mesh; flags win over it."""

    listen: str = "127.0.0.1:0"
    store: str = "sqlite"
    store_quota_bytes: int = 0
    disk_reserve_bytes: int = 128 * 2**20
    work_bytes_max: int = 0
    gpus: str = "auto"
    nodes: int = 1
    shareable_gpus: bool = False
    split_siblings: bool = False
    pids_max: int = 32_768
    shared_identity: bool = False
    share_machine: bool = False
    rack: str = ""
    queue: str = "fifo"
    placement: str = "consolidate"
    allocator: str = "proportional"
    predictor: str = "history"
    follow: str = ""
    contention: str = "coda-eliminator"
    sample_seconds: float = 5.0
    memory_bandwidth_peak: float = 0.0
    heartbeat_seconds: float = 5.0
    lost_after_seconds: float = 300.0
    preemption: str = "policy"
    run_seconds_min: float = 0.0
    reclaim: bool = True
    reserve_after_seconds: float = 600.0
    reservations: int = 1
    fair_share: str = "tenants"
    window_seconds: float = 10.0
    profile_seconds: float = 300.0
    checkpoint_seconds: float = 300.0
    failure_rules: str = ""
    retry_seconds: float = 10.0
    retry_seconds_max: float = 600.0
    infrastructure_retries: int = 3
    launch_failures: int = 3
    quick_failures: int = 3
    canary_seconds: float = 10.0
    canary_seconds_max: float = 600.0
    ended_jobs: int = 20_000
    ended_days: float = 30.0
    history_seconds: float = 600.0
    archive: str = ""
    options: Mapping[str, Mapping[str, str]] | None = None
    sections: Mapping[str, Mapping[str, Any]] | None = None  # those of cotenant.cli.mesh.security_options, by name

    @property
    def predictors(self) -> tuple[str, ...]:
        """The predictors that are asked, in their order."""
        return names_of(self.predictor)


def read_settings(path: Path | None) -> Settings:
    """Read a TOML file; without one all is as by default.

    Raises:
        CommandError: the file cannot be read, is no TOML (with line and column), or has unknown or unfit keys.
    """
    if path is None:
        return Settings()
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise usage(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also no UTF-8, a number without end, or nested too deeply
        raise usage(f"{path} is no TOML: {error}") from None
    sections = {name: table.pop(name) for name in SECTIONS if name in table}
    kinds = {field.name: field for field in fields(Settings) if field.name != "sections"}
    wrong = [f"{key}: no such setting{did_you_mean(key, [*kinds, *SECTIONS])}" for key in table if key not in kinds]
    wrong += wrong_sections(sections)
    known = {key: value for key, value in table.items() if key in kinds}
    wrong += [told for key, value in known.items() if (told := _unfit(key, value))]
    if wrong:
        raise usage(f"{path} cannot be taken", details=wrong)
    if "options" in known:
        known["options"] = {group: dict(_flat(own)) for group, own in known["options"].items()}
    return Settings(**known, sections=sections)


def _flat(own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Write options as flags would have them; those in a table within the group's are for the one it is named by."""
    for key, value in own.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", text) for name, text in _flat(value))
        else:
            yield key, str(value)


def rules_of(settings: Settings) -> Rules:
    """Say who may be stopped for whom.

    Raises:
        CommandError: naming every setting that makes no sense.
    """
    from cotenant.core.scheduling.admission import Rules  # numpy, which --help need not wait for

    names = ("preemption", "run_seconds_min", "reclaim", "reserve_after_seconds", "reservations", "fair_share")
    given = {name: getattr(settings, name) for name in names}
    if given["reserve_after_seconds"] == math.inf:
        given["reserve_after_seconds"] = None  # TOML has no other word for it
    try:
        return parse(Rules, {name: written(value) for name, value in given.items()})
    except BadOption as error:
        raise usage(str(error)) from None


def store_limits_of(settings: Settings) -> StoreLimits:
    """Return what the operator says of the store's limits."""
    from cotenant.store.capacity import StoreLimits

    return StoreLimits(settings.store_quota_bytes, settings.disk_reserve_bytes)


def check_failure_rules(settings: Settings) -> str:
    """Return the operator's file of failure rules, if there is one, once it is known to be sound.

    Raises:
        CommandError: naming the file, the line and the field that is wrong.
    """
    from cotenant.core.failures.rules import BadRules
    from cotenant.services.queue.jobs.failure_classifier import read_rules

    try:
        read_rules(settings.failure_rules)
    except BadRules as error:
        raise usage(str(error)) from None
    return settings.failure_rules


def retrying_of(settings: Settings) -> RetryRules:
    """Say how failures are retried.

    >>> rules = retrying_of(Settings(retry_seconds_max=60))
    >>> rules.back_off_seconds_max, rules.untold_back_off_seconds_max
    (60, 60)
    """
    from cotenant.core.failures.retry import RetryRules

    most = settings.retry_seconds_max
    return RetryRules(
        back_off_seconds=settings.retry_seconds,
        back_off_seconds_max=most,
        infrastructure_retries=settings.infrastructure_retries,
        untold_back_off_seconds_max=min(RetryRules().untold_back_off_seconds_max, most),
    )


def holding_of(settings: Settings) -> HoldRules:
    """Return when nodes are held for what becomes of launches there.

    >>> holding_of(Settings(canary_seconds=1.0)).interval_seconds(2)
    4.0
    """
    from cotenant.core.failures.launch_health import HoldRules

    return HoldRules(
        failures=settings.launch_failures,
        quick_jobs=settings.quick_failures,
        canary_seconds=settings.canary_seconds,
        canary_seconds_max=settings.canary_seconds_max,
    )


def archive_of(settings: Settings, state_dir: Path) -> Path | None:
    """Say into which file ended jobs are written before they are forgotten; None where they are not.

    >>> archive_of(Settings(), Path("/s")), archive_of(Settings(archive="none"), Path("/s"))
    (PosixPath('/s/archive.sqlite'), None)
    """
    if settings.archive == "none":
        return None
    return state_dir / (settings.archive or ARCHIVE_FILE)


def _unfit(key: str, value: Any) -> str:
    if key == "options":
        if not isinstance(value, dict) or not all(isinstance(own, dict) for own in value.values()):
            return "options: must be tables by group, for example [options.queue]"
        unknown = [group for group in value if group not in GROUPS]
        return f"options.{unknown[0]}: no such group{did_you_mean(unknown[0], GROUPS)}" if unknown else ""
    default = getattr(Settings(), key)
    if isinstance(default, bool) != isinstance(value, bool):
        return f"{key}: must be {_kind(default)}, not {value!r}"
    if isinstance(value, int | float) and not isinstance(value, bool) and not value >= 0:
        return f"{key}: must be 0 or more, not {value!r}"
    if isinstance(default, float) and isinstance(value, int):
        return ""
    return "" if isinstance(value, type(default)) else f"{key}: must be {_kind(default)}, not {value!r}"


def _kind(default: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[type(default)]


def read_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read `group.key=value` options.

    >>> read_options(["queue.mode=backfill"])
    {'queue': {'mode': 'backfill'}}

    Raises:
        CommandError: naming every one that is not of this form.
    """
    options: dict[str, dict[str, str]] = {}
    wrong = []
    for text in texts:
        path, equals, value = text.partition("=")
        group, dot, key = path.partition(".")
        if not (equals and dot and key):
            wrong.append(f"{text!r} is not of the form group.key=value")
        elif group not in GROUPS:
            wrong.append(f"{text!r}: no such group{did_you_mean(group, GROUPS)}; {', '.join(GROUPS)} are")
        else:
            options.setdefault(group, {})[key] = value
    if wrong:
        raise usage("options cannot be taken", details=wrong)
    return options


def merged(*layers: Mapping[str, Mapping[str, str]] | None) -> dict[str, dict[str, str]]:
    """Lay options over each other; later layers win."""
    result: dict[str, dict[str, str]] = {}
    for layer in layers:
        for group, own in (layer or {}).items():
            result.setdefault(group, {}).update(own)
    return result


def node_name() -> str:
    """This machine's name as a node's id."""
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname().lower()).strip("-.")
    return name or "node"


def split_cpus(nodes: int) -> list[tuple[int, ...] | None]:
    """Divide this machine's CPUs among so many nodes; None stands for all of them.

    Raises:
        CommandError: there are fewer CPUs than nodes.
    """
    if nodes == 1:
        return [None]
    cpus = sorted(os.sched_getaffinity(0))
    if not 1 <= nodes <= len(cpus):
        raise usage(
            f"this machine has {len(cpus)} CPUs; they make from 1 to {len(cpus)} nodes, not {nodes}",
            hint="each node needs a CPU of its own, since cores are never shared",
        )
    size, more = divmod(len(cpus), nodes)
    bounds = [number * size + min(number, more) for number in range(nodes + 1)]
    return [tuple(cpus[begin:end]) for begin, end in pairwise(bounds)]
