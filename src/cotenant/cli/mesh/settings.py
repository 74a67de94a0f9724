"""Settings of `up` and `serve`: the configuration file, policy options, this machine's nodes."""

from __future__ import annotations

import math
import os
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotenant import plugins
from cotenant.cli.mesh.security_options import SECTIONS, invalid_sections
from cotenant.cli.outcome import usage_error
from cotenant.core.policy import profiles
from cotenant.core.policy.options import BadOption, parse, split_names, written
from cotenant.core.policy.profiles import GROUPS
from cotenant.core.spelling import did_you_mean

if TYPE_CHECKING:
    from cotenant.core.failures.launch_health import HoldRules
    from cotenant.core.failures.retry import RetryRules
    from cotenant.core.scheduling.admission import Rules
    from cotenant.services.queue.folders.folder_store import FolderRules
    from cotenant.store.capacity import StoreLimits

ARCHIVE_FILE = "archive.sqlite"
UPLOADS_DIRECTORY = "uploads"
TRACE_URL_HELP = "Where the dashboard links to a job's trace, such as 'https://jaeger.example.org/trace/{trace_id}'."
AGENT = (  # settings of agents, named as in `AgentConfig`
    "rack", "shareable_gpus", "split_siblings", "memory_bandwidth_peak", "pids_max", "work_bytes_max",
    "disk_reserve_bytes", "folder_cache_bytes", "scratch_directory", "shared_identity", "share_machine",
    "runtime",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a configuration file; flags override them."""

    listen: str = "127.0.0.1:0"
    metrics: str = ""
    web: bool = True
    web_port: int = 0
    trace_url: str = ""  # of a job's trace, with {trace_id}
    gateway: str = ""
    store: str = "sqlite"
    store_quota_bytes: int = 0
    disk_reserve_bytes: int = 128 * 2**20
    work_bytes_max: int = 0
    folder_cache_bytes: int = 10 * 2**30
    gpus: str = "auto"
    nodes: int = 1
    shareable_gpus: bool = False
    split_siblings: bool = False
    pids_max: int = 32_768
    scratch_directory: str = ""
    container_mounts: str = "any"  # "none", or directories separated by commas
    shared_identity: bool = False
    share_machine: bool = False
    runtime: str = "process"  # a plug-in that runs attempts on nodes
    rack: str = ""
    profile: str = profiles.DEFAULT
    queue: str = ""  # of the profile; so are the other policies
    placement: str = ""
    allocator: str = ""
    predictor: str = ""
    follow: str = ""
    contention: str = ""
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
    usage_half_life_seconds: float = 7 * 86_400.0
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
    uploads: str = ""
    upload_quota_bytes: int = 50 * 2**30
    upload_days: float = 7.0
    options: Mapping[str, Mapping[str, str]] | None = None
    sections: Mapping[str, Mapping[str, Any]] | None = None  # tables of cotenant.cli.mesh.security_options, by name

    @property
    def predictors(self) -> tuple[str, ...]:
        """The predictors in the order in which they are asked."""
        return split_names(self.predictor)


def with_profile(settings: Settings) -> Settings:
    """Return the settings with the profile's policies for those that are not named, and with its options for them.

    >>> chosen = with_profile(Settings(profile="plain", placement="spread"))
    >>> chosen.queue, chosen.placement, chosen.options
    ('fifo', 'spread', {'queue': {'mode': 'backfill'}})

    Raises:
        CommandError: there is no such profile.
    """
    try:
        profile = profiles.find(settings.profile)
    except profiles.UnknownProfile as error:
        raise usage_error(str(error), hint="`cotenant policies --profile` shows what each contains") from None
    given = {group: getattr(settings, group) for group in GROUPS}
    names = profile.names(given)
    defaults = profiles.BACKFILL if names["queue"] == "fifo" else {}
    options = merged(defaults, profile.options_with(given), settings.options)
    return replace(settings, options=options, **names)  # type: ignore[arg-type]  # names of policies, which are texts


def check_trace_url(url: str) -> None:
    """Refuse an address of traces that no browser follows, or that names no trace.

    Raises:
        CommandError: with what is missing.
    """
    if url and not url.startswith(("http://", "https://")):
        raise usage_error(f"--trace-url {url!r} does not begin with http:// or https://")
    if url and "{trace_id}" not in url:
        raise usage_error(f"--trace-url {url!r} has no {{trace_id}}, for which the trace of a job is put in")


def read_settings(path: Path | None) -> Settings:
    """Return the settings of a TOML file; the defaults without a file.

    Raises:
        CommandError: the file is unreadable, is not TOML (with line and column), or has unknown or invalid keys.
    """
    if path is None:
        return Settings()
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also not UTF-8, an endless number, or nested too deeply
        raise usage_error(f"{path} is not TOML: {error}") from None
    sections = {name: table.pop(name) for name in SECTIONS if name in table}
    kinds = {field.name: field for field in fields(Settings) if field.name != "sections"}
    wrong = [f"{key}: unknown setting{did_you_mean(key, [*kinds, *SECTIONS])}" for key in table if key not in kinds]
    wrong += invalid_sections(sections)
    known = {key: value for key, value in table.items() if key in kinds}
    wrong += [reason for key, value in known.items() if (reason := _type_error(key, value))]
    if wrong:
        raise usage_error(f"{path} has invalid settings", details=wrong)
    if "options" in known:
        known["options"] = {group: dict(_flat(own)) for group, own in known["options"].items()}
    return Settings(**known, sections=sections)


def agent_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that all agents of a mesh take from its configuration file, as arguments of `AgentConfig`.

    Raises:
        CommandError: there is no such runtime, or containers may not mount what is given.
    """
    try:
        plugins.check_installed("cotenant.runtimes", settings.runtime)
    except plugins.UnknownPolicy as error:
        raise usage_error(str(error)) from None
    of_agents: dict[str, Any] = {name: getattr(settings, name) for name in AGENT}
    mounts = allowed_mounts(settings.container_mounts)
    return {**of_agents, "container_mounts": mounts, "sample_interval_seconds": settings.sample_seconds}


def allowed_mounts(text: str) -> tuple[str, ...] | None:
    """Return the directories in which containers may mount something; None: anywhere.

    >>> allowed_mounts("any"), allowed_mounts("none"), allowed_mounts("/data, /scratch/")
    (None, (), ('/data', '/scratch'))

    Raises:
        CommandError: one of them is no absolute path.
    """
    if text in ("any", "none"):
        return None if text == "any" else ()
    places = [place.strip() for place in text.split(",")]
    for place in places:
        if not place.startswith("/") or ".." in place.split("/"):
            raise usage_error(
                f"container_mounts must be any, none, or absolute directories separated by commas, not {place!r}"
            )
    return tuple(place.rstrip("/") or "/" for place in places)


def _flat(own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield options as flags would give them; a nested table holds options of the policy it is named after."""
    for key, value in own.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", text) for name, text in _flat(value))
        else:
            yield key, str(value)


def sharing_rules(settings: Settings) -> Rules:
    """Return the rules for preemption, reclaim, reservations and fair share.

    Raises:
        CommandError: names every invalid setting.
    """
    from cotenant.core.scheduling.admission import Rules  # imports numpy, too slow for --help

    given = {name: getattr(settings, name) for name in Rules.__dataclass_fields__}
    if given["reserve_after_seconds"] == math.inf:
        given["reserve_after_seconds"] = None  # TOML has no null
    try:
        return parse(Rules, {name: written(value) for name, value in given.items()})
    except BadOption as error:
        raise usage_error(str(error)) from None


def read_store_limits(settings: Settings) -> StoreLimits:
    """Return the operator's store limits."""
    from cotenant.store.capacity import StoreLimits

    return StoreLimits(settings.store_quota_bytes, settings.disk_reserve_bytes)


def check_failure_rules(settings: Settings) -> str:
    """Return the operator's file of failure rules, "" if there is none, after validating it.

    Raises:
        CommandError: names the file, line and field of an error.
    """
    from cotenant.core.failures.rules import BadRules
    from cotenant.services.queue.jobs.failure_classifier import read_rules

    try:
        read_rules(settings.failure_rules)
    except BadRules as error:
        raise usage_error(str(error)) from None
    return settings.failure_rules


def retry_rules(settings: Settings) -> RetryRules:
    """Return how failures are retried.

    >>> rules = retry_rules(Settings(retry_seconds_max=60))
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


def hold_rules(settings: Settings) -> HoldRules:
    """Return when nodes are held because of launch failures.

    >>> hold_rules(Settings(canary_seconds=1.0)).interval_seconds(2)
    4.0
    """
    from cotenant.core.failures.launch_health import HoldRules

    return HoldRules(
        failures=settings.launch_failures,
        quick_jobs=settings.quick_failures,
        canary_seconds=settings.canary_seconds,
        canary_seconds_max=settings.canary_seconds_max,
    )


def archive_path(settings: Settings, state_dir: Path) -> Path | None:
    """Return the file for ended jobs before they are deleted from the store; None if they are not archived.

    >>> archive_path(Settings(), Path("/s")), archive_path(Settings(archive="none"), Path("/s"))
    (PosixPath('/s/archive.sqlite'), None)
    """
    if settings.archive == "none":
        return None
    return state_dir / (settings.archive or ARCHIVE_FILE)


def folder_rules(settings: Settings, state_dir: Path) -> FolderRules:
    """Return where uploaded folders are kept, and how much; replicas of the queue need the same directory.

    >>> folder_rules(Settings(uploads="/shared/uploads"), Path("/s")).directory
    PosixPath('/shared/uploads')
    """
    from cotenant.services.queue.folders.folder_store import FolderRules

    directory = state_dir / (settings.uploads or UPLOADS_DIRECTORY)
    return FolderRules(directory, settings.upload_quota_bytes, settings.upload_days * 86_400)


def _type_error(key: str, value: Any) -> str:
    if key == "options":
        if not isinstance(value, dict) or not all(isinstance(own, dict) for own in value.values()):
            return "options: must be tables by group, such as [options.queue]"
        unknown = [group for group in value if group not in GROUPS]
        return f"options.{unknown[0]}: unknown group{did_you_mean(unknown[0], GROUPS)}" if unknown else ""
    default = getattr(Settings(), key)
    if isinstance(default, bool) != isinstance(value, bool):
        return f"{key}: must be {_kind(default)}, not {value!r}"
    if isinstance(value, int | float) and not isinstance(value, bool) and not value >= 0:
        return f"{key}: must be 0 or more, not {value!r}"
    if isinstance(default, float) and isinstance(value, int):
        return ""
    return "" if isinstance(value, type(default)) else f"{key}: must be {_kind(default)}, not {value!r}"


def _kind(default: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[type(default)]


def read_options(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return `group.key=value` options by group.

    >>> read_options(["queue.mode=backfill"])
    {'queue': {'mode': 'backfill'}}

    Raises:
        CommandError: names every invalid option.
    """
    options: dict[str, dict[str, str]] = {}
    wrong = []
    for text in texts:
        path, equals, value = text.partition("=")
        group, dot, key = path.partition(".")
        if not (equals and dot and key):
            wrong.append(f"{text!r} must have the form group.key=value")
        elif group not in GROUPS:
            wrong.append(f"{text!r}: unknown group{did_you_mean(group, GROUPS)}; groups are {', '.join(GROUPS)}")
        else:
            options.setdefault(group, {})[key] = value
    if wrong:
        raise usage_error("invalid options", details=wrong)
    return options


def merged(*layers: Mapping[str, Mapping[str, str]] | None) -> dict[str, dict[str, str]]:
    """Return options merged; later layers override earlier ones."""
    result: dict[str, dict[str, str]] = {}
    for layer in layers:
        for group, own in (layer or {}).items():
            result.setdefault(group, {}).update(own)
    return result


def node_name() -> str:
    """Return a node id made from the host name."""
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname().lower()).strip("-.")
    return name or "node"


def split_cpus(nodes: int) -> list[tuple[int, ...] | None]:
    """Return this machine's CPUs divided among nodes; None means all CPUs.

    Raises:
        CommandError: there are fewer CPUs than nodes.
    """
    if nodes == 1:
        return [None]
    cpus = sorted(os.sched_getaffinity(0))
    if not 1 <= nodes <= len(cpus):
        raise usage_error(
            f"this machine has {len(cpus)} CPUs, enough for 1 to {len(cpus)} nodes, not {nodes}",
            hint="each node needs its own CPU, because cores are never shared",
        )
    size, more = divmod(len(cpus), nodes)
    bounds = [number * size + min(number, more) for number in range(nodes + 1)]
    return [tuple(cpus[begin:end]) for begin, end in pairwise(bounds)]
