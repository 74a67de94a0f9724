"""A job as options say it: one table for `submit` and `whatif`, read by the code that reads job files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from cotenant.cli.jobs.job_file import BadJobs, Draft, Mistake, load_jobs, read_options, source_of
from cotenant.cli.outcome import usage
from cotenant.cli.source_positions import Fields, Items, Node, Place, Text

THE_COMMAND_LINE = Place("the command line")
TAIL = "cotenant.tail"  # what stands behind `--`, in the context's meta


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option that sets a field of a job file."""

    field: str
    metavar: str
    help: str
    name: str = ""

    @property
    def flag(self) -> str:
        """The option as it is written."""
        return f"--{self.name or self.field.replace('_', '-')}"

    @property
    def parameter(self) -> str:
        """The option's name in Python."""
        return f"job_{self.field.replace('.', '_')}"


TEXTS = (
    JobOption("name", "NAME", "A name for people; need not be unique."),
    JobOption("kind", "KIND", "training, inference or cpu; left out: training with GPUs, cpu without."),
    JobOption("gpus", "N", "GPUs of each replica: 1, 8, or a share such as 0.5."),
    JobOption("cpus", "N|auto", "Cores of each replica; auto finds how many are useful."),
    JobOption("memory", "SIZE", "Memory of each replica, such as 4GiB."),
    JobOption("gpu_type", "TYPE", "The GPU type wanted, such as V100, or one of several: 'V100|A100'."),
    JobOption("replicas", "N|auto", "How many processes start together; auto: as many as a service's latency needs."),
    JobOption("replicas_min", "N", "The fewest replicas that auto may choose; 1 by default."),
    JobOption("replicas_max", "N", "The most replicas that auto may choose; 64 by default."),
    JobOption("qos.latency", "DURATION", "How long requests to a service may take, such as 50ms.", "latency"),
    JobOption("qos.percentile", "P", "The share of requests for which that holds, such as 99.", "percentile"),
    JobOption("qos.arrivals", "N", "Requests that arrive in a second, over all replicas.", "arrivals"),
    JobOption("qos.rate", "N", "The slowest acceptable rate, in steps per second.", "rate"),
    JobOption("role", "NAME", "What the replicas are called; worker by default."),
    JobOption("tenant", "ID", "Who pays."),
    JobOption("queue", "ID", "The queue."),
    JobOption("priority", "CLASS|N", "low, normal, high or urgent, or a number: higher runs earlier."),
    JobOption("deadline", "TIME", "When it should be done: 2h, or 2030-01-31T18:00."),
    JobOption("expected", "DURATION", "How long you think that it runs."),
    JobOption("model", "TAG", "The model tag under which history is kept."),
    JobOption("steps", "N", "Steps until it is done."),
    JobOption("progress.regex", "REGEX", "Reads the step from its output, such as 'step (\\d+)'.", "progress-regex"),
    JobOption("profile", "auto|never", "Whether its cores may be measured while it runs; never: they are left alone."),
    JobOption("locality", "WISH", "server, rack or anywhere."),
    JobOption("retries", "N", "How many times a failed attempt is tried again."),
    JobOption("grace", "DURATION", "Between the warning signal and the kill; 30s by default."),
    JobOption("signal", "SIGNAL", "The warning signal; SIGTERM by default."),
    JobOption("after", "ID,…", "Starts once these jobs or arrays have ended, however: ids, or names in the same file."),
    JobOption("after_ok", "ID,…", "Starts once these have succeeded; cancelled where one has not."),
    JobOption("array", "INDICES", "Many jobs, one for each index: 0-99, 1,3,5-9, or 0-99%10 for 10 at once."),
    JobOption("workdir", "DIR", "Where it starts; a directory of its own by default."),
)
PAIRS = (
    JobOption("env", "K[=V]", "A variable of its environment; K alone takes yours; repeatable."),
    JobOption("labels", "K=V", "A label of your own; repeatable.", "label"),
)
NOT_PREEMPTIBLE = JobOption("not_preemptible", "", "It is never stopped to make room.")


class TailCommand(TyperCommand):
    """A command behind whose options another command may stand, after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what stands behind `--` as it is."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[TAIL] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show the tail in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def takes_job(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of a job; it is called with `job`, what they say together with the tail."""

    def wrapper(context: typer.Context, **given: Any) -> None:
        names = {option.parameter for option in (*TEXTS, *PAIRS, NOT_PREEMPTIBLE)}
        said = {name: given.pop(name) for name in names}
        command(context=context, job=_document(said, context.meta.get(TAIL)), **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*(one for one in own if one.name != "job"), *_parameters()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    wrapper.__doc__, wrapper.__name__ = command.__doc__, command.__name__
    return wrapper


def read_drafts(files: Iterable[str], job: Fields, now: float) -> list[Draft]:
    """Read the jobs of all files with the options over each, or the one job of the options.

    Raises:
        BadJobs: naming every mistake in every file.
    """
    paths = list(files)
    if not paths:
        if not any(key.text == "command" for key, _ in job.entries):
            raise usage(
                "nothing to run",
                hint="name a job file, or write the command behind `--`, as in: submit --gpus 1 -- python3 train.py",
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


def read_questions(files: Iterable[str], job: Fields, now: float) -> list[Draft]:
    """Read jobs that are only asked about: such a question needs no program, but a spec does.

    Raises:
        BadJobs: naming every mistake in every file.
    """
    paths = list(files)
    if not paths and not any(key.text == "command" for key, _ in job.entries):
        nothing = Items(job.place, (Text(job.place, "true"),))
        job = Fields(job.place, (*job.entries, (Text(job.place, "command"), nothing)))
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


def _document(said: Mapping[str, Any], tail: list[str] | None) -> Fields:
    """Make a job file's content of options."""
    texts = ((option, said[option.parameter]) for option in TEXTS)
    pairs = ((option, said[option.parameter]) for option in PAIRS)
    entries: list[tuple[Text, Node]] = [
        *_gathered(_entry(option.field, option.flag, text) for option, text in texts if text is not None),
        *((Text(Place(option.flag), option.field), _pairs(option, given)) for option, given in pairs if given),
    ]
    if said[NOT_PREEMPTIBLE.parameter]:
        entries.append(_entry("preemptible", NOT_PREEMPTIBLE.flag, "false"))
    if tail:
        words = tuple(Text(THE_COMMAND_LINE, word) for word in tail)
        entries.append((Text(THE_COMMAND_LINE, "command"), Items(THE_COMMAND_LINE, words)))
    return Fields(THE_COMMAND_LINE, tuple(entries))


def _gathered(entries: Iterable[tuple[Text, Node]]) -> Iterable[tuple[Text, Node]]:
    """Make one entry of those that set fields inside the same field."""
    found: dict[str, tuple[Text, Node]] = {}
    for key, value in entries:
        before = found.get(key.text)
        if before and isinstance(before[1], Fields) and isinstance(value, Fields):
            value = Fields(before[1].place, (*before[1].entries, *value.entries))
        found[key.text] = before[0] if before else key, value
    return found.values()


def _entry(field: str, flag: str, text: str) -> tuple[Text, Node]:
    """Set a field, `progress.regex` as one inside another."""
    outer, _, inner = field.partition(".")
    place = Place(flag)
    value: Node = Text(place, text)
    if inner:
        value = Fields(place, ((Text(place, inner), value),))
    return Text(place, outer), value


def _pairs(option: JobOption, pairs: Iterable[str]) -> Fields:
    taken: dict[str, str] = {}
    for pair in pairs:
        key, given, value = pair.partition("=")
        if not given and option.field == "env" and key in os.environ:
            value, given = os.environ[key], "="
        if not given or not key:
            meant = "; it is not set here" if option.field == "env" and key else ""
            raise usage(f"{option.flag} {pair}: has no value{meant}", hint=f"write {option.flag} KEY=VALUE")
        taken[key] = value
    place = Place(option.flag)
    return Fields(place, tuple((Text(place, key), Text(place, value)) for key, value in taken.items()))
