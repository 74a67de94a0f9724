r"""Job files: what a user wants to be run, in YAML, and every mistake in it at once with its line and column.

A file holds one job, or several that are parted by `---`. The fields are those of the options of `cotenant submit`,
and options are read by the same code: they are a document whose places are `--gpus` and the like. Durations,
sizes and counts are texts until the field that takes them reads them.

>>> [job] = read_jobs("gpus: 8\nmemory: 64GiB\ncommand: [python3, train.py]", "job.yaml", now=0.0)
>>> job.spec.kind.value, job.spec.gpu_milli, job.spec.roles[0].request.memory_bytes
('training', 8000, 68719476736)
>>> read_jobs("gpu: 8\ngrace: soon\ncommand: [python3, train.py]", "job.yaml", now=0.0)
Traceback (most recent call last):
...
cotenant.cli.jobs.job_file.BadJobs: job.yaml has 2 mistakes
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.cli import units
from cotenant.cli.jobs.job_fields import (
    AFTER,
    GOAL,
    JOB,
    JOB_FIELDS,
    OTHER_NAMES,
    PROGRESS,
    QOS,
    REQUEST,
    ROLE,
    ROLE_FIELDS,
    SHORT_ROLE,
    Field,
)
from cotenant.cli.outcome import CommandError, ExitCode, is_text, usage
from cotenant.cli.source_positions import Fault, Fields, Items, Node, Place, Text, compose, kind_of, overlay
from cotenant.codec.specs import spec_to_wire
from cotenant.core.model.dependencies import Dependency
from cotenant.core.model.job import JobSpec, OpenReplicas, Qos, Request, Role, SubmitDirectory
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.validation import ROLES_MAX, check_spec, default_kind, shown
from cotenant.core.spelling import did_you_mean
from cotenant.v1 import job_pb2

FILE_BYTES_MAX = 2**20
JOBS_MAX = 1000
MISTAKES_SHOWN_MAX = 100
STDIN = "-"
SHELL = ("sh", "-c")  # runs a command that is one text


@dataclass(frozen=True, slots=True)
class Mistake:
    """Something wrong at a place; `label` names the field, where the place does not."""

    place: Place
    label: str
    message: str

    def __str__(self) -> str:
        """The mistake on one line."""
        named_by_place = self.place.source.startswith("--")
        return ": ".join([str(self.place), *([self.label] if self.label and not named_by_place else []), self.message])


class BadJobs(CommandError):
    """Jobs that cannot be taken, with all that is wrong with them."""

    def __init__(self, source: str, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(dict.fromkeys(mistakes))  # an option over several jobs is wrong once
        count = len(self.mistakes)
        lines = [str(mistake) for mistake in self.mistakes[:MISTAKES_SHOWN_MAX]]
        if count > MISTAKES_SHOWN_MAX:
            lines.append(f"and {count - MISTAKES_SHOWN_MAX} more")
        message = f"{source} has {count} mistakes" if count > 1 else f"{source} has a mistake"
        super().__init__(message, details=lines, code=ExitCode.USAGE)


@dataclass(frozen=True, slots=True)
class Draft:
    """A job that was read: its spec, and where each field of it was written."""

    spec: JobSpec
    place: Place
    places: Mapping[str, tuple[Place, str]]  # of a wire path: the place, and the field's name in the file

    def submitted_from(self, folder: SubmitDirectory | None) -> Draft:
        """Return this job, submitted from a folder."""
        return replace(self, spec=replace(self.spec, submit_directory=folder))

    def to_wire(self, spec: JobSpec) -> job_pb2.JobSpec:
        """Write a spec of this job; where no tenant was named, the caller's own is meant, which the queue knows."""
        message = spec_to_wire(spec)
        if "tenant" not in self.places:
            message.ClearField("tenant")
        return message

    def mistake(self, field: str, message: str) -> Mistake:
        """Point at the field that a violation names, or at the nearest one around it that was written."""
        path = field.removeprefix("spec.")
        while path:
            if path in self.places:
                place, label = self.places[path]
                return Mistake(place, label, message)
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return Mistake(self.place, field.removeprefix("spec."), message)


def load_jobs(path: str, now: float, above: Fields | None = None) -> list[Draft]:
    """Read a job file, or stdin where the path is `-`, with options over it.

    Raises:
        CommandError: the file cannot be read.
        BadJobs: what stands in it cannot be taken.
    """
    try:
        raw = sys.stdin.buffer.read(FILE_BYTES_MAX + 1) if path == STDIN else _head(Path(path))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise usage(f"cannot read {path}: {why}", hint="a command to run stands behind `--`") from None
    source = source_of(path)
    if len(raw) > FILE_BYTES_MAX:
        raise usage(f"{source} has more than 1 MiB", hint="a job file says what to run; put data elsewhere")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadJobs(source, [Mistake(Place(source, line), "", "is no UTF-8 text")]) from None
    return read_jobs(text, source, now, above)


def source_of(path: str) -> str:
    """Name a file in errors."""
    return "stdin" if path == STDIN else path


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def read_jobs(text: str, source: str, now: float, above: Fields | None = None) -> list[Draft]:
    """Read all jobs of a YAML text, with options over each.

    Raises:
        BadJobs: naming every mistake in every job.
    """
    drafts, mistakes = [], []
    for node in compose(text, source):
        if isinstance(node, Fault):
            mistakes.append(Mistake(node.place, "", node.message))
            continue
        reader = _Reader(now)
        node = _with_plain_keys(node)
        drafts.append(reader.job(overlay(node, above) if above else node))
        mistakes += sorted(reader.mistakes, key=lambda mistake: mistake.place[1:])
        if len(drafts) > JOBS_MAX:
            mistakes.append(Mistake(node.place, "", f"is one job too many; a file may have {JOBS_MAX}"))
            break
    if not (drafts or mistakes):
        mistakes.append(Mistake(Place(source), "", "has no job in it; `cotenant submit --example` shows one"))
    if mistakes:
        raise BadJobs(source, mistakes)
    return drafts


def read_options(options: Fields, now: float) -> Draft:
    """Read a job from options alone.

    Raises:
        BadJobs: naming every option that cannot be taken.
    """
    reader = _Reader(now)
    draft = reader.job(options)
    if reader.mistakes:
        raise BadJobs("the command line", reader.mistakes)
    return draft


class _Reader:
    """Reads one document, and goes on after a mistake."""

    def __init__(self, now: float) -> None:
        self.mistakes: list[Mistake] = []
        self._now = now
        self._place = Place("")
        self._places: dict[str, tuple[Place, str]] = {}
        self._failed: set[str] = set()

    def job(self, node: Node) -> Draft:
        """Read a job; what could not be read keeps its default."""
        self._place = node.place
        given = self._fields(node, JOB_FIELDS, "job")
        deadline = {
            "deadline": Field("deadline_seconds", "deadline", lambda text: units.parse_deadline(text, self._now))
        }
        values = self._scalars(given, {**JOB, **deadline})
        qos = self._inner(given, "qos", QOS)
        goal = self._inner(given, "goal", GOAL)
        progress = self._inner(given, "progress", PROGRESS)
        roles = self._roles(given)
        spec = JobSpec(
            **{"kind": default_kind(roles), **values, **progress},
            roles=roles,
            command=self._command(given, "", ""),
            environment=self._pairs(given, "env", "environment"),
            labels=self._pairs(given, "labels", "labels"),
            qos=Qos(**qos),
            loss_goal=LossGoal(**goal),
            dependencies=self._dependencies(given),
        )
        draft = Draft(spec, node.place, self._places)
        if isinstance(node, Fields):
            self._judge(draft)
        return draft

    def _judge(self, draft: Draft) -> None:
        """Apply the rules that every job obeys, except where a field that a rule looks at could not be read."""
        unread = {field.rsplit(".", 1)[-1] for field in self._failed}
        doubtful = {"kind", "gpu_type"} if unread & {"gpu_milli", "roles"} else set()
        for violation in check_spec(draft.spec, now=self._now):
            path = violation.field.removeprefix("spec.")
            leaf = path.rsplit(".", 1)[-1]
            if path not in self._failed and leaf not in doubtful and not (leaf == "command" and leaf in unread):
                self.mistakes.append(draft.mistake(violation.field, violation.description))

    def _fields(self, node: Node, known: Iterable[str], what: str) -> dict[str, tuple[Text, Node]]:
        """Take a map apart; report what is no field, and what stands twice."""
        if not isinstance(node, Fields):
            self._report(node.place, "", f"a {what} is a map of fields, not {kind_of(node)}")
            return {}
        found: dict[str, tuple[Text, Node]] = {}
        for key, value in node.entries:
            if key.text not in known:
                meant = _meant(key.text, known) if len(self.mistakes) < MISTAKES_SHOWN_MAX else ""
                self._report(key.place, "", f"a {what} has no field {shown(key.text)}{meant}")
            elif key.text in found:
                self._report(key.place, key.text, "stands twice")
            else:
                found[key.text] = (key, value)
        return found

    def _scalars(
        self, given: Mapping[str, tuple[Text, Node]], known: Mapping[str, Field], wire: str = "", label: str = ""
    ) -> dict[str, Any]:
        """Read the fields of one text each."""
        values = {}
        for name, field in known.items():
            if name not in given:
                continue
            _, node = given[name]
            path = f"{wire}{field.wire}"
            self._places[path] = node.place, f"{label}{name}"
            text = self._text(node, path, f"{label}{name}")
            if text is None:
                continue
            try:
                values[field.attribute] = field.read(text)
            except ValueError as error:
                self._fail(path, node.place, f"{label}{name}", str(error))
        return values

    def _inner(self, given: Mapping[str, tuple[Text, Node]], name: str, known: Mapping[str, Field]) -> dict[str, Any]:
        if name not in given:
            return {}
        return self._scalars(self._fields(given[name][1], known, f"{name} entry"), known, label=f"{name}.")

    def _roles(self, given: Mapping[str, tuple[Text, Node]]) -> tuple[Role, ...]:
        """Read the list of roles, or the one role whose fields are the job's."""
        if "roles" not in given:
            self._places["roles[0].command"] = self._place, "command"
            values = self._role_values(given, SHORT_ROLE, "roles[0].")
            return (Role(**values, request=Request(**self._scalars(given, REQUEST, "roles[0]."))),)
        for name in (*SHORT_ROLE, *REQUEST):
            if name in given:
                self._report(given[name][0].place, name, "stands beside roles; say it in each role")
        node = given["roles"][1]
        self._places["roles"] = node.place, "roles"
        if not isinstance(node, Items):
            self._fail("roles", node.place, "roles", f"must be a list of roles, not {kind_of(node)}")
            return (Role(),)
        if len(node.items) > ROLES_MAX:
            self._fail("roles", node.place, "roles", f"at most {ROLES_MAX} are taken, not {len(node.items)}")
        return tuple(self._role(index, item) for index, item in enumerate(node.items[:ROLES_MAX]))

    def _role(self, index: int, node: Node) -> Role:
        wire, label = f"roles[{index}].", f"roles[{index}]."
        self._places[f"roles[{index}]"] = node.place, f"roles[{index}]"
        given = self._fields(node, ROLE_FIELDS, "role")
        request = Request(**self._scalars(given, REQUEST, wire, label))
        values = self._role_values(given, ROLE, wire, label)
        return Role(**values, request=request, command=self._command(given, wire, label))

    def _role_values(
        self, given: Mapping[str, tuple[Text, Node]], known: Mapping[str, Field], wire: str, label: str = ""
    ) -> dict[str, Any]:
        """Read a role's own fields; where its replicas are `auto`, their number is open between some bounds."""
        values = self._scalars(given, known, wire, label)
        bounds = {name: values.pop(name) for name in ("least", "most") if name in values}
        if values.get("replicas", 1) is None:
            self._places[f"{wire}open"] = given["replicas"][1].place, f"{label}replicas"
            return {**values, "replicas": max(1, bounds.get("least", 1)), "open": OpenReplicas(**bounds)}
        for name in ("replicas_min", "replicas_max"):
            if name in given:
                self._report(given[name][0].place, f"{label}{name}", "says something only beside `replicas: auto`")
        return values

    def _dependencies(self, given: Mapping[str, tuple[Text, Node]]) -> tuple[Dependency, ...]:
        """Read what comes first: a list of ids or names, or one text of them with commas between."""
        found: list[Dependency] = []
        for name, condition in AFTER.items():
            node = given[name][1] if name in given else Items(self._place, ())
            for item in node.items if isinstance(node, Items) else (node,):
                text = self._text(item, f"dependencies[{len(found)}].id", name)
                for word in [text] if isinstance(node, Items) else (text or "").split(","):
                    self._places[f"dependencies[{len(found)}].id"] = item.place, name
                    found.append(Dependency((word or "").strip(), condition))
        return tuple(found)

    def _command(self, given: Mapping[str, tuple[Text, Node]], wire: str, label: str) -> tuple[str, ...]:
        """Read a command: a list is run as it stands, a text by the shell."""
        if "command" not in given:
            return ()
        path, name = f"{wire}command", f"{label}command"
        node = given["command"][1]
        self._places[path] = node.place, name
        match node:
            case Items(items=items):
                words = [self._text(item, path, f"{name}[{index}]") for index, item in enumerate(items)]
                return tuple(word for word in words if word is not None)
            case Text(null=False):
                script = self._text(node, path, name)
                return () if script is None else (*SHELL, script)
        self._fail(path, node.place, name, f"must be a list of words, or a text for the shell, not {kind_of(node)}")
        return ()

    def _pairs(self, given: Mapping[str, tuple[Text, Node]], name: str, wire: str) -> tuple[tuple[str, str], ...]:
        """Read a map of texts."""
        if name not in given:
            return ()
        node = given[name][1]
        self._places[wire] = node.place, name
        if not isinstance(node, Fields):
            self._fail(wire, node.place, name, f"must be a map of texts, not {kind_of(node)}")
            return ()
        pairs: dict[str, str] = {}
        for key, value in node.entries:
            path, label = f"{wire}[{shown(key.text)}]", f"{name}.{key.text}"
            self._places[path] = key.place, label
            if key.text in pairs:
                self._report(key.place, label, "stands twice")
            text = self._text(value, path, label)
            if text is not None:
                pairs[key.text] = text
        return tuple(sorted(pairs.items()))

    def _text(self, node: Node, path: str, label: str) -> str | None:
        if isinstance(node, Text) and not node.null:
            if is_text(node.text):
                return node.text
            self._fail(path, node.place, label, "has a character that cannot be written in UTF-8")
            return None
        empty = "has no value; write '' for an empty text" if isinstance(node, Text) else ""
        self._fail(path, node.place, label, empty or f"must be one value, not {kind_of(node)}")
        return None

    def _fail(self, path: str, place: Place, label: str, message: str) -> None:
        self._failed.add(path)
        self._report(place, label, message)

    def _report(self, place: Place, label: str, message: str) -> None:
        self.mistakes.append(Mistake(place, label, message))


def _with_plain_keys(node: Node) -> Node:
    """Take `after-ok` for `after_ok`, as options are written."""
    if not isinstance(node, Fields):
        return node
    plain = [(key, key.text.replace("-", "_")) for key, _ in node.entries]
    keys = [replace(key, text=name) if name in JOB_FIELDS else key for key, name in plain]
    return replace(node, entries=tuple(zip(keys, (value for _, value in node.entries), strict=True)))


def _meant(name: str, known: Iterable[str]) -> str:
    other = OTHER_NAMES.get(name, "")
    return f"; did you mean {other}?" if other in known else did_you_mean(name, known)
