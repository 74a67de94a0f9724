"""Options that describe a job: one table for `submit`, `whatif` and `predict`, read by the job file parser."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cotenant.cli.jobs.job_file import BadJobs, Draft, Mistake, load_jobs, read_options, source_of
from cotenant.cli.outcome import usage_error
from cotenant.cli.source_positions import ListNode, MapNode, Node, ScalarNode, SourcePosition

THE_COMMAND_LINE = SourcePosition("the command line")
TAIL = "cotenant.tail"  # key in the context's meta: the words after `--`


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option that sets a field of a job file."""

    field: str
    metavar: str
    help: str
    name: str = ""

    @property
    def flag(self) -> str:
        """The option's flag."""
        return f"--{self.name or self.field.replace('_', '-')}"

    @property
    def parameter(self) -> str:
        """The option's name in Python."""
        return f"job_{self.field.replace('.', '_')}"


TEXTS = (
    JobOption("name", "NAME", "Display name; need not be unique."),
    JobOption("kind", "KIND", "training, inference or cpu; default: training with GPUs, cpu without."),
    JobOption("gpus", "N", "GPUs per replica: 1, 8, or a fraction such as 0.5."),
    JobOption("cpus", "N|auto", "Cores per replica; auto finds the useful number."),
    JobOption("memory", "SIZE", "Memory per replica, such as 4GiB."),
    JobOption("gpu_type", "TYPE", "GPU type, such as V100, or alternatives: 'V100|A100'."),
    JobOption("replicas", "N|auto", "Processes that start together; auto: as many as a service's objective needs."),
    JobOption("replicas_min", "N", "Minimum for --replicas auto; default 1."),
    JobOption("replicas_max", "N", "Maximum for --replicas auto; default 64."),
    JobOption("qos.latency", "DURATION", "Latency objective of a service, such as 50ms.", "latency"),
    JobOption("qos.percentile", "P", "Percentile of the latency objective, such as 99.", "percentile"),
    JobOption("qos.arrivals", "N", "Requests per second over all replicas.", "arrivals"),
    JobOption("qos.rate", "N", "Minimum rate in steps per second.", "rate"),
    JobOption("role", "NAME", "Role name of the replicas; default worker."),
    JobOption("tenant", "ID", "Tenant to charge."),
    JobOption("queue", "ID", "Queue."),
    JobOption("priority", "CLASS|N", "low, normal, high, urgent or a number; higher runs earlier."),
    JobOption("deadline", "TIME", "Deadline: 2h, or 2030-01-31T18:00."),
    JobOption("expected", "DURATION", "Expected run time."),
    JobOption("model", "TAG", "Model tag; jobs with the same tag share history."),
    JobOption("steps", "N", "Total number of steps."),
    JobOption("progress.regex", "REGEX", "Reads the step from the output, such as 'step (\\d+)'.", "progress-regex"),
    JobOption("profile", "auto|never", "Whether the job may be profiled on fewer cores while it runs."),
    JobOption("locality", "LEVEL", "Topology level for all replicas: server, rack or anywhere."),
    JobOption("retries", "N", "How often a failed attempt is retried."),
    JobOption("grace", "DURATION", "Grace period between warning signal and kill; default 30s."),
    JobOption("signal", "SIGNAL", "Warning signal; default SIGTERM."),
    JobOption("after", "ID,…", "Start after these jobs or arrays have ended: ids, or names in the same file."),
    JobOption("after_ok", "ID,…", "Start after these have succeeded; cancel the job if one has not."),
    JobOption("array", "INDICES", "One job per index: 0-99, 1,3,5-9, or 0-99%10 for 10 at a time."),
    JobOption("workdir", "DIR", "Working directory on the nodes; default: the current folder."),
)
PAIRS = (
    JobOption("env", "K[=V]", "Environment variable; K alone copies yours; repeatable."),
    JobOption("labels", "K=V", "Label; repeatable.", "label"),
)
NOT_PREEMPTIBLE = JobOption("not_preemptible", "", "Never preempt the job.")


class TailCommand(TyperCommand):
    """A command that accepts another command line after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words after `--` unparsed."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[TAIL] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show the tail in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with all job options, passed as the document `job`, including the words after `--`."""

    def wrapper(context: typer.Context, **given: Any) -> None:
        names = {option.parameter for option in (*TEXTS, *PAIRS, NOT_PREEMPTIBLE)}
        given_options = {name: given.pop(name) for name in names}
        command(context=context, job=_document(given_options, context.meta.get(TAIL)), **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*(one for one in own if one.name != "job"), *_parameters()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def read_drafts(files: Iterable[str], job: MapNode, now: float) -> list[Draft]:
    """Return the jobs of all files with the options applied to each, or the job described by the options alone.

    Raises:
        BadJobs: names every mistake in every file.
    """
    paths = list(files)
    if not paths:
        if not any(key.text == "command" for key, _ in job.entries):
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
    def parameter(option: JobOption, kind: Any, default: Any) -> inspect.Parameter:
        declared = typer.Option(option.flag, metavar=option.metavar or None, help=option.help, show_default=False)
        return inspect.Parameter(
            option.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
        )

    yield from (parameter(option, str | None, None) for option in TEXTS)
    yield from (parameter(option, list[str] | None, None) for option in PAIRS)
    yield parameter(NOT_PREEMPTIBLE, bool, False)


def _document(given_options: Mapping[str, Any], tail: list[str] | None) -> MapNode:
    """Return the options as a job file document."""
    texts = ((option, given_options[option.parameter]) for option in TEXTS)
    pairs = ((option, given_options[option.parameter]) for option in PAIRS)
    entries: list[tuple[ScalarNode, Node]] = [
        *_merge_nested(_entry(option.field, option.flag, text) for option, text in texts if text is not None),
        *(
            (ScalarNode(SourcePosition(option.flag), option.field), _pairs(option, given))
            for option, given in pairs
            if given
        ),
    ]
    if given_options[NOT_PREEMPTIBLE.parameter]:
        entries.append(_entry("preemptible", NOT_PREEMPTIBLE.flag, "false"))
    if tail:
        words = tuple(ScalarNode(THE_COMMAND_LINE, word) for word in tail)
        entries.append((ScalarNode(THE_COMMAND_LINE, "command"), ListNode(THE_COMMAND_LINE, words)))
    return MapNode(THE_COMMAND_LINE, tuple(entries))


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


def _pairs(option: JobOption, pairs: Iterable[str]) -> MapNode:
    pairs_given: dict[str, str] = {}
    for pair in pairs:
        key, given, value = pair.partition("=")
        if not given and option.field == "env" and key in os.environ:
            value, given = os.environ[key], "="
        if not given or not key:
            meant = ", and your environment does not set it" if option.field == "env" and key else ""
            raise usage_error(f"{option.flag} {pair}: value is missing{meant}", hint=f"write {option.flag} KEY=VALUE")
        pairs_given[key] = value
    place = SourcePosition(option.flag)
    return MapNode(
        place, tuple((ScalarNode(place, key), ScalarNode(place, value)) for key, value in pairs_given.items())
    )
