"""Options that describe a job: one table for `submit`, `whatif` and `predict`, read by the job file parser."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from cotenant.cli.annotations import typer
from cotenant.cli.flags import TAIL
from cotenant.cli.jobs.job_fields import ALL_FIELDS, OF_SEVERAL
from cotenant.cli.jobs.job_file import (
    BadJobs,
    Draft,
    Mistake,
    env_variables,
    load_jobs,
    read_options,
    source_of,
    with_env_files,
)
from cotenant.cli.outcome import usage_error
from cotenant.cli.source_positions import ListNode, MapNode, Node, ScalarNode, SourcePosition
from cotenant.core.model.job_fields import FieldType, JobField
from cotenant.core.model.resources import AMOUNT_KINDS

THE_COMMAND_LINE = SourcePosition("the command line")


HELP_ORDER = (  # other fields follow
    "name", "kind", "gpus", "cpus", *(kind.key for kind in AMOUNT_KINDS),
    "gpu_type", "replicas", "replicas_min", "replicas_max", "qos.latency",
    "qos.percentile", "qos.arrivals", "qos.rate", "role", "tenant", "queue", "priority", "deadline", "begin",
    "expected", "time_limit", "model", "steps", "progress.regex", "profile", "locality", "retries", "grace", "signal",
    "after", "after_ok", "array", "workdir", "upload", "env_from", "notify_on",
)  # fmt: skip


def in_order(fields: Iterable[JobField], order: Sequence[str]) -> tuple[JobField, ...]:
    """Return the fields whose keys `order` names in that order, then the others as they come."""
    return tuple(sorted(fields, key=lambda field: order.index(field.key) if field.key in order else len(order)))


TEXTS = in_order(
    (field for field in ALL_FIELDS if field.metavar and field.type not in (FieldType.PAIRS, FieldType.TEXTS)),
    HELP_ORDER,
)
PAIRS = tuple(OF_SEVERAL[key] for key in ("env", "labels"))
ENV_FILE = OF_SEVERAL["env_file"]
LISTS = (OF_SEVERAL["notify"], OF_SEVERAL["secrets"], OF_SEVERAL["mounts"])
SWITCHES = tuple(field for field in ALL_FIELDS if field.switch)
NOT_PREEMPTIBLE = JobField("not_preemptible", FieldType.BOOLEAN, help="Never preempt the job.")


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with all job options, passed as the document `job`, including the words after `--`."""
    return with_parameters(command, "job", _parameters(), document, at_end=True)


def with_parameters(
    command: Callable[..., None],
    name: str,
    parameters: Iterable[inspect.Parameter],
    build: Callable[[typer.Context, Mapping[str, Any]], Any],
    *,
    at_end: bool = False,
) -> Callable[..., None]:
    """Return a command with parameters, from whose values its argument `name` is built; they take its place."""
    added = list(parameters)

    def wrapper(context: typer.Context, **given: Any) -> None:
        own_values = {one.name: given.pop(one.name) for one in added}
        command(context=context, **given, **{name: build(context, own_values)})

    own = list(inspect.signature(command, eval_str=True).parameters.values())
    place = [one.name for one in own].index(name)
    after = own[place + 1 :]
    signature = [*own[:place], *after, *added] if at_end else [*own[:place], *added, *after]
    wrapper.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {one.name: one.annotation for one in signature}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def parameter_name(option: JobField) -> str:
    """Return an option's name in Python."""
    return f"job_{option.key.replace('.', '_')}"


def keyword(option: JobField, annotation: Any, default: Any) -> inspect.Parameter:
    """Return an option's parameter, for `with_parameters`."""
    return inspect.Parameter(
        parameter_name(option), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def read_drafts(files: Iterable[str], job: MapNode, now: float) -> list[Draft]:
    """Return the jobs of all files with the options applied to each, or the job described by the options alone.

    Raises:
        BadJobs: names every mistake in every file.
    """
    paths = list(files)
    if not paths:
        if not any(key.text in ("command", "image") for key, _ in job.entries):
            raise usage_error(
                "nothing to run",
                hint="name a job file, or put the command after `--`: cotenant submit --gpus 1 -- python3 train.py",
            )
        return [read_options(job, now)]
    drafts: list[Draft] = []
    mistakes: list[Mistake] = []
    for path in paths:
        try:
            drafts += load_jobs(path, now, job)
        except BadJobs as error:
            mistakes += error.mistakes
    if mistakes:
        raise BadJobs(", ".join(map(source_of, paths)), mistakes)
    return drafts


def read_whatif_drafts(files: Iterable[str], job: MapNode, now: float) -> list[Draft]:
    """Return jobs that will not be submitted, so that options need no command; a spec needs one, so it gets `true`.

    Raises:
        BadJobs: names every mistake in every file.
    """
    paths = list(files)
    if not paths and not any(key.text == "command" for key, _ in job.entries):
        nothing = ListNode(job.place, (ScalarNode(job.place, "true"),))
        job = MapNode(job.place, (*job.entries, (ScalarNode(job.place, "command"), nothing)))
    return read_drafts(paths, job, now)


def _parameters() -> Iterable[inspect.Parameter]:
    def parameter(option: JobField, kind: Any, default: Any) -> inspect.Parameter:
        declared = typer.Option(
            f"--{option.flag}", metavar=option.metavar or None, help=option.help, show_default=False
        )
        return keyword(option, Annotated[kind, declared], default)

    yield from (parameter(option, str | None, None) for option in TEXTS)
    yield from (parameter(option, list[str] | None, None) for option in (*PAIRS, ENV_FILE, *LISTS))
    yield from (parameter(option, bool, False) for option in (NOT_PREEMPTIBLE, *SWITCHES))


def document(context: typer.Context, given_options: Mapping[str, Any]) -> MapNode:
    """Return the options, and the words after `--`, as a job file document."""
    tail = context.meta.get(TAIL)
    texts = ((option, given_options[parameter_name(option)]) for option in TEXTS)
    pairs = {option.key: _pairs(option, given_options[parameter_name(option)] or ()) for option in PAIRS}
    if paths := given_options[parameter_name(ENV_FILE)]:
        pairs["env"] = with_env_files(_env_files(paths), pairs["env"])
    entries: list[tuple[ScalarNode, Node]] = [
        *_merge_nested(_entry(option.key, f"--{option.flag}", text) for option, text in texts if text is not None),
        *((ScalarNode(node.place, key), node) for key, node in pairs.items() if node.entries),
    ]
    for option in LISTS:
        if texts_given := given_options[parameter_name(option)]:
            place = SourcePosition(f"--{option.flag}")
            items = tuple(ScalarNode(place, one) for one in texts_given)
            entries.append((ScalarNode(place, option.key), ListNode(place, items)))
    if given_options[parameter_name(NOT_PREEMPTIBLE)]:
        entries.append(_entry("preemptible", f"--{NOT_PREEMPTIBLE.flag}", "false"))
    entries += [
        _entry(option.key, f"--{option.flag}", "true") for option in SWITCHES if given_options[parameter_name(option)]
    ]
    if tail:
        words = tuple(ScalarNode(THE_COMMAND_LINE, word) for word in tail)
        entries.append((ScalarNode(THE_COMMAND_LINE, "command"), ListNode(THE_COMMAND_LINE, words)))
    return MapNode(THE_COMMAND_LINE, tuple(entries))


def _env_files(paths: Sequence[str]) -> list[MapNode]:
    """Return the variables of each `--env-file`.

    Raises:
        BadJobs: names every mistake of every file.
    """
    mistakes: list[Mistake] = []
    place = SourcePosition(f"--{ENV_FILE.flag}")
    found = [env_variables(path, place, mistakes) for path in paths]
    if mistakes:
        raise BadJobs(", ".join(dict.fromkeys(paths)), mistakes)
    return found


def _merge_nested(entries: Iterable[tuple[ScalarNode, Node]]) -> Iterable[tuple[ScalarNode, Node]]:
    """Return entries with those that set nested fields of the same field merged."""
    found: dict[str, tuple[ScalarNode, Node]] = {}
    for key, value in entries:
        before = found.get(key.text)
        if before and isinstance(before[1], MapNode) and isinstance(value, MapNode):
            value = MapNode(before[1].place, (*before[1].entries, *value.entries))
        found[key.text] = before[0] if before else key, value
    return found.values()


def _entry(field: str, flag: str, text: str) -> tuple[ScalarNode, Node]:
    """Return the entry that sets a field; `progress.regex` is a nested field."""
    outer, _, inner = field.partition(".")
    place = SourcePosition(flag)
    value: Node = ScalarNode(place, text)
    if inner:
        value = MapNode(place, ((ScalarNode(place, inner), value),))
    return ScalarNode(place, outer), value


def _pairs(option: JobField, pairs: Iterable[str]) -> MapNode:
    flag, pairs_given = f"--{option.flag}", dict[str, str]()
    for pair in pairs:
        key, given, value = pair.partition("=")
        if not given and option.key == "env" and key in os.environ:
            value, given = os.environ[key], "="
        if not given or not key:
            meant = ", and your environment does not set it" if option.key == "env" and key else ""
            raise usage_error(f"{flag} {pair}: value is missing{meant}", hint=f"write {flag} KEY=VALUE")
        pairs_given[key] = value
    place = SourcePosition(flag)
    return MapNode(
        place, tuple((ScalarNode(place, key), ScalarNode(place, value)) for key, value in pairs_given.items())
    )
