r"""Job files in YAML: parse them, and report all mistakes at once with their lines and columns.

A file holds one or more jobs separated by `---`. The fields are those of the options of `cotenant submit`, and options
are read by the same code: they form a document whose positions are `--gpus` and the like. Durations, sizes and counts
stay texts until their field parses them.

>>> [job] = read_jobs("gpus: 8\nmemory: 64GiB\ncommand: [python3, train.py]", "job.yaml", now=0.0)
>>> job.spec.kind.value, job.spec.gpu_milli, job.spec.roles[0].request.memory_bytes
('training', 8000, 68719476736)
>>> read_jobs("gpu: 8\ngrace: soon\ncommand: [python3, train.py]", "job.yaml", now=0.0)
Traceback (most recent call last):
...
cotenant.cli.jobs.job_file.BadJobs: job.yaml has 2 mistakes
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.cli.jobs.env_file import BadFile, read_env_file
from cotenant.cli.jobs.job_fields import (
    AFTER,
    AFTER_CONDITIONS,
    GROUPS,
    JOB_FIELDS,
    LISTED_ROLE,
    OF_REQUEST,
    OF_SEVERAL,
    OTHER_NAMES,
    PLAIN,
    ROLE_FIELDS,
    SINGLE_ROLE,
    Fields,
    read,
)
from cotenant.cli.jobs.python_environment import (
    FoundEnvironment,
    NoEnvironment,
    find_environment,
    named_environment,
    variables_with,
    variables_without,
)
from cotenant.cli.outcome import CommandError, ExitCode, is_text, usage_error
from cotenant.cli.source_positions import (
    DocumentError,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    SourcePosition,
    compose,
    kind_of,
    overlay,
)
from cotenant.codec.specs import spec_to_wire
from cotenant.core.model.dependencies import Condition, Dependency
from cotenant.core.model.job import (
    SUBMIT_VARIABLES,
    EnvironmentChoice,
    EnvironmentSource,
    JobSpec,
    OpenReplicas,
    PythonEnvironment,
    ReplicaRange,
    Request,
    Role,
    SubmitDirectory,
)
from cotenant.core.model.job_fields import attributes
from cotenant.core.model.mounts import Mount, parse_mount
from cotenant.core.model.notification import Trigger
from cotenant.core.model.secrets import SecretUse, parse_use
from cotenant.core.model.validation import ROLES_MAX, check_spec, default_kind, shown
from cotenant.core.spelling import did_you_mean
from cotenant.v1 import job_pb2

FILE_BYTES_MAX = 2**20
JOBS_MAX = 1000
MISTAKES_SHOWN_MAX = 100
STDIN = "-"
EMPTY_WORKDIR = "none"  # instead of a working directory: an empty one of the job's own
SHELL = ("sh", "-c")  # runs a command given as one string


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake at a position; `label` names the field unless the position does."""

    place: SourcePosition
    label: str
    message: str

    def __str__(self) -> str:
        """Return the mistake on one line."""
        named_by_place = self.place.source.startswith("--")
        return ": ".join([str(self.place), *([self.label] if self.label and not named_by_place else []), self.message])


class BadJobs(CommandError):
    """Invalid jobs, with all their mistakes."""

    def __init__(self, source: str, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(dict.fromkeys(mistakes))  # a wrong option is reported once, not per job
        count = len(self.mistakes)
        lines = [str(mistake) for mistake in self.mistakes[:MISTAKES_SHOWN_MAX]]
        if count > MISTAKES_SHOWN_MAX:
            lines.append(f"and {count - MISTAKES_SHOWN_MAX} more")
        message = f"{source} has {count} mistakes" if count > 1 else f"{source} has a mistake"
        super().__init__(message, details=lines, code=ExitCode.USAGE)


AUTO_UPLOAD = "auto"  # in place of a folder: upload the current one if a node may not have it


@dataclass(frozen=True, slots=True)
class Draft:
    """A parsed job: its spec, and the position of each field."""

    spec: JobSpec
    place: SourcePosition
    places: Mapping[str, tuple[SourcePosition, str]]  # by wire path: the position, and the field's name in the file
    like: str = ""  # id of the earlier job or array that it repeats
    empty_workdir: bool = False  # it asks for an empty working directory
    keeps_folder: bool = False  # nodes that have its folder start it there, although it is uploaded
    env_from: EnvironmentChoice = EnvironmentChoice.AUTO

    def submitted_from(self, folder: SubmitDirectory | None, shell: Mapping[str, str]) -> Draft:
        """Return this job, submitted from a folder of a shell; where it asks for another one, it does not start there.

        Raises:
            BadJobs: it asks for a Python environment that the shell does not have.
        """
        if folder is None or self.empty_workdir or self.spec.upload not in ("", AUTO_UPLOAD):
            placed = replace(self, spec=self.spec.without_folder())
        else:
            placed = replace(self, spec=replace(self.spec, submit_directory=folder))
            if self.env_from is EnvironmentChoice.AUTO:
                return placed._with_found_environment(shell)
        return placed.with_environment(folder.path if folder else "", shell)

    def with_environment(self, folder: str, shell: Mapping[str, str]) -> Draft:
        """Return this job with the Python environment that it asks for, or without one.

        Raises:
            BadJobs: the shell does not have it.
        """
        if self.env_from is EnvironmentChoice.AUTO:
            return self
        directory, own = self.spec.submit_directory, dict(self.spec.environment)
        if self.env_from is EnvironmentChoice.NONE:
            return self._without_environment()
        try:
            found = named_environment(self.env_from.value, shell, folder or shell.get("PWD", ""))
        except NoEnvironment as error:
            raise BadJobs("the submission", [self.mistake("python_environment", str(error))]) from None
        path, *others = SUBMIT_VARIABLES
        own = {name: value for name, value in own.items() if name not in others}
        inherited = (path, "CONDA_DEFAULT_ENV") if self.env_from is EnvironmentChoice.CONDA else (path,)
        copied = {name: shell[name] for name in inherited if name in shell}
        spec = replace(
            self.spec,
            environment=_sorted(variables_with(found, {**copied, **own})),
            submit_directory=directory and replace(directory, environment=()),
            python_environment=_python_environment(found, requested=True),
        )
        return replace(self, spec=spec)

    def _without_environment(self) -> Draft:
        spec, directory = self.spec, self.spec.submit_directory
        if directory:
            kept = _sorted(variables_without(dict(directory.environment)))
            spec = replace(spec, submit_directory=replace(directory, environment=kept))
        if spec.python_environment and spec.python_environment.requested:  # of an earlier job
            spec = replace(spec, environment=_sorted(variables_without(dict(spec.environment))))
        return replace(self, spec=replace(spec, python_environment=None))

    def _with_found_environment(self, shell: Mapping[str, str]) -> Draft:
        """Return this job with the environment of the shell for its folder, unless it names its own search path."""
        folder = self.spec.submit_directory
        if folder is None or self.spec.working_directory or "PATH" in dict(self.spec.environment):
            return self
        found = find_environment(shell, folder.path)
        if found is None:
            return self
        directory = replace(folder, environment=_sorted(variables_with(found, dict(folder.environment))))
        return replace(
            self,
            spec=replace(self.spec, submit_directory=directory, python_environment=_python_environment(found)),
        )

    def to_wire(self, spec: JobSpec) -> job_pb2.JobSpec:
        """Return the message of a spec; without an explicit tenant, the queue uses the caller's own."""
        message = spec_to_wire(spec)
        if "tenant" not in self.places:
            message.ClearField("tenant")
        return message

    def mistake(self, field: str, message: str) -> Mistake:
        """Return a violation as a mistake at its field, or at the nearest enclosing field in the file."""
        path = field.removeprefix("spec.")
        while path:
            if path in self.places:
                place, label = self.places[path]
                return Mistake(place, label, message)
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return Mistake(self.place, field.removeprefix("spec."), message)


def _python_environment(found: FoundEnvironment, *, requested: bool = False) -> PythonEnvironment:
    return PythonEnvironment(EnvironmentSource(found.source), found.path, found.interpreter, requested)


def _sorted(variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(variables.items()))


def env_variables(path: str, place: SourcePosition, mistakes: list[Mistake]) -> MapNode:
    """Return the variables of a dotenv file, each at its line; what is wrong with it is added to `mistakes`."""
    try:
        variables, wrong = read_env_file(os.path.expanduser(path))
    except BadFile as error:
        at = SourcePosition(path, error.line) if error.line else place
        mistakes.append(Mistake(at, "", str(error) if error.line else f"{path} {error}"))
        return MapNode(place, ())
    mistakes += (Mistake(SourcePosition(path, line), "", message) for line, message in wrong)
    places = [SourcePosition(path, one.line) for one in variables]
    return MapNode(
        place,
        tuple((ScalarNode(at, one.name), ScalarNode(at, one.value)) for at, one in zip(places, variables, strict=True)),
    )


def with_env_files(files: Iterable[MapNode], variables: MapNode) -> MapNode:
    """Return a map of variables with those of files: a later file wins over an earlier one, the map over files."""
    found = {key.text: (key, value) for file in files for key, value in file.entries}
    own = {key.text for key, _ in variables.entries}
    return replace(variables, entries=(*(one for name, one in found.items() if name not in own), *variables.entries))


def load_jobs(path: str, now: float, overrides: MapNode | None = None) -> list[Draft]:
    """Return the jobs of a file, or of stdin for `-`, with overrides applied.

    Raises:
        CommandError: the file cannot be read.
        BadJobs: the file has mistakes.
    """
    try:
        raw = sys.stdin.buffer.read(FILE_BYTES_MAX + 1) if path == STDIN else _head(Path(path))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise usage_error(f"cannot read {path}: {why}", hint="put a command to run after `--`") from None
    source = source_of(path)
    if len(raw) > FILE_BYTES_MAX:
        raise usage_error(f"{source} is larger than 1 MiB", hint="a job file only describes jobs; store data elsewhere")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadJobs(source, [Mistake(SourcePosition(source, line), "", "not UTF-8 text")]) from None
    return read_jobs(text, source, now, overrides)


def source_of(path: str) -> str:
    """Return the name of a file for error messages."""
    return "stdin" if path == STDIN else path


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def read_jobs(text: str, source: str, now: float, overrides: MapNode | None = None) -> list[Draft]:
    """Return all jobs of a YAML text, with overrides applied to each.

    Raises:
        BadJobs: names every mistake in every job.
    """
    drafts, mistakes = [], []
    for node in compose(text, source):
        if isinstance(node, DocumentError):
            mistakes.append(Mistake(node.place, "", node.message))
            continue
        reader = _Reader(now)
        node = _with_plain_keys(node)
        drafts.append(reader.job(overlay(node, overrides) if overrides else node))
        mistakes += sorted(reader.mistakes, key=lambda mistake: mistake.place[1:])
        if len(drafts) > JOBS_MAX:
            mistakes.append(Mistake(node.place, "", f"too many jobs; a file may have {JOBS_MAX}"))
            break
    if not (drafts or mistakes):
        mistakes.append(Mistake(SourcePosition(source), "", "contains no job; see `cotenant submit --example`"))
    if mistakes:
        raise BadJobs(source, mistakes)
    return drafts


def read_options(options: MapNode, now: float) -> Draft:
    """Return a job built from options alone.

    Raises:
        BadJobs: names every invalid option.
    """
    reader = _Reader(now)
    draft = reader.job(options)
    if reader.mistakes:
        raise BadJobs("the command line", reader.mistakes)
    return draft


class _Reader:
    """Reads one document and continues after mistakes."""

    def __init__(self, now: float) -> None:
        self.mistakes: list[Mistake] = []
        self._now = now
        self._place = SourcePosition("")
        self._places: dict[str, tuple[SourcePosition, str]] = {}
        self._failed: set[str] = set()

    def job(self, node: Node) -> Draft:
        """Return a job; unreadable fields keep their defaults."""
        self._place = node.place
        given = self._fields(node, JOB_FIELDS, "job")
        values = self._scalars(given, {**PLAIN, **{name: OF_SEVERAL[name] for name in ("array", "env_from")}})
        for name, fields in GROUPS.items():
            values |= self._inner(given, name, fields)
        roles = self._roles(given)
        if empty := values.get("working_directory") == EMPTY_WORKDIR:
            del values["working_directory"]
        env_from = values.pop("python_environment", EnvironmentChoice.AUTO)
        values["container.mounts"] = self._mounts(given)
        spec = JobSpec(
            **attributes({"kind": default_kind(roles), **values}),
            roles=roles,
            command=self._command(given, "", ""),
            environment=self._pairs(self._with_env_files(given), "env", "environment"),
            labels=self._pairs(given, "labels", "labels"),
            dependencies=self._dependencies(given),
            notify=tuple(self._texts(given, "notify")),
            notify_on=self._triggers(given),
            secrets=self._secrets(given),
        )
        draft = Draft(spec, node.place, self._places, empty_workdir=empty, env_from=env_from)
        if isinstance(node, MapNode):
            self._check_rules(draft)
        return draft

    def _check_rules(self, draft: Draft) -> None:
        """Validate the job, skipping rules about fields that could not be read."""
        unread = {field.rsplit(".", 1)[-1] for field in self._failed}
        unchecked = {"kind", "gpu_type"} if unread & {"gpu_milli", "roles"} else set()
        for violation in check_spec(draft.spec, now=self._now):
            path = violation.field.removeprefix("spec.")
            leaf = path.rsplit(".", 1)[-1]
            if path not in self._failed and leaf not in unchecked and not (leaf == "command" and leaf in unread):
                self.mistakes.append(draft.mistake(violation.field, violation.description))

    def _fields(self, node: Node, known: Iterable[str], what: str) -> dict[str, tuple[ScalarNode, Node]]:
        """Return the fields of a map; report unknown and duplicate fields."""
        if not isinstance(node, MapNode):
            self._report(node.place, "", f"a {what} must be a map of fields, not {kind_of(node)}")
            return {}
        found: dict[str, tuple[ScalarNode, Node]] = {}
        for key, value in node.entries:
            if key.text not in known:
                meant = _suggestion(key.text, known) if len(self.mistakes) < MISTAKES_SHOWN_MAX else ""
                self._report(key.place, "", f"unknown {what} field {shown(key.text)}{meant}")
            elif key.text in found:
                self._report(key.place, key.text, "duplicate field")
            else:
                found[key.text] = (key, value)
        return found

    def _scalars(
        self, given: Mapping[str, tuple[ScalarNode, Node]], known: Fields, wire: str = "", label: str = ""
    ) -> dict[str, Any]:
        """Return the values of scalar fields, by attribute."""
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
                values[field.attribute] = read(field, text, self._now)
            except ValueError as error:
                self._fail(path, node.place, f"{label}{name}", str(error))
        return values

    def _inner(self, given: Mapping[str, tuple[ScalarNode, Node]], name: str, known: Fields) -> dict[str, Any]:
        if name not in given:
            return {}
        return self._scalars(self._fields(given[name][1], known, f"{name} entry"), known, label=f"{name}.")

    def _roles(self, given: Mapping[str, tuple[ScalarNode, Node]]) -> tuple[Role, ...]:
        """Return the listed roles, or the single role whose fields are the job's own."""
        if "roles" not in given:
            self._places["roles[0].command"] = self._place, "command"
            values = self._role_values(given, SINGLE_ROLE, "roles[0].")
            return (Role(**values, request=Request(**self._scalars(given, OF_REQUEST, "roles[0]."))),)
        for name in (*SINGLE_ROLE, *OF_REQUEST):
            if name in given:
                self._report(given[name][0].place, name, "not allowed beside roles; set it in each role")
        node = given["roles"][1]
        self._places["roles"] = node.place, "roles"
        if not isinstance(node, ListNode):
            self._fail("roles", node.place, "roles", f"must be a list of roles, not {kind_of(node)}")
            return (Role(),)
        if len(node.items) > ROLES_MAX:
            self._fail("roles", node.place, "roles", f"must have at most {ROLES_MAX} roles, not {len(node.items)}")
        return tuple(self._role(index, item) for index, item in enumerate(node.items[:ROLES_MAX]))

    def _role(self, index: int, node: Node) -> Role:
        wire, label = f"roles[{index}].", f"roles[{index}]."
        self._places[f"roles[{index}]"] = node.place, f"roles[{index}]"
        given = self._fields(node, ROLE_FIELDS, "role")
        request = Request(**self._scalars(given, OF_REQUEST, wire, label))
        values = self._role_values(given, LISTED_ROLE, wire, label)
        return Role(**values, request=request, command=self._command(given, wire, label))

    def _role_values(
        self, given: Mapping[str, tuple[ScalarNode, Node]], known: Fields, wire: str, label: str = ""
    ) -> dict[str, Any]:
        """Return a role's own fields; with `replicas: auto` or a range the number is chosen within bounds."""
        values = self._scalars(given, known, wire, label)
        bounds = {name: values.pop(name) for name in ("least", "most") if name in values}
        if values.get("replicas", 1) is None:
            self._places[f"{wire}open"] = given["replicas"][1].place, f"{label}replicas"
            return {**values, "replicas": max(1, bounds.get("least", 1)), "open": OpenReplicas(**bounds)}
        for name in ("replicas_min", "replicas_max"):
            if name in given:
                self._report(given[name][0].place, f"{label}{name}", "only allowed with `replicas: auto`")
        if isinstance(values.get("replicas"), tuple):
            for field in ("", ".min", ".max"):
                self._places[f"{wire}elastic{field}"] = given["replicas"][1].place, f"{label}replicas"
            elastic = ReplicaRange(*values["replicas"])
            return {**values, "replicas": max(1, elastic.least), "elastic": elastic}
        return values

    def _texts(self, given: Mapping[str, tuple[ScalarNode, Node]], name: str) -> Iterator[str]:
        """Yield the texts of a list, or a single text."""
        node = given[name][1] if name in given else ListNode(self._place, ())
        self._places[name] = node.place, name
        for index, item in enumerate(node.items if isinstance(node, ListNode) else (node,)):
            path = f"{name}[{index}]"
            self._places[path] = item.place, path if isinstance(node, ListNode) else name
            if (text := self._text(item, path, path)) is not None:
                yield text

    def _triggers(self, given: Mapping[str, tuple[ScalarNode, Node]]) -> tuple[Trigger, ...]:
        """Return when to notify: a list, or one comma-separated text."""
        found: list[Trigger] = []
        field = OF_SEVERAL["notify_on"]
        for text in self._texts(given, field.key):
            for word in text.split(","):
                try:
                    found.append(read(field, word, self._now))
                except ValueError as error:
                    self._fail(field.key, self._places[field.key][0], field.key, str(error))
        return tuple(dict.fromkeys(found))

    def _secrets(self, given: Mapping[str, tuple[ScalarNode, Node]]) -> tuple[SecretUse, ...]:
        """Return the secrets that the job names."""
        found: list[SecretUse] = []
        for index, text in enumerate(self._texts(given, "secrets")):
            place, label = self._places[f"secrets[{index}]"]
            for part in ("name", "variable", "path"):
                self._places[f"secrets[{len(found)}].{part}"] = place, label
            try:
                found.append(parse_use(text))
            except ValueError as error:
                self._fail(f"secrets[{index}]", place, label, str(error))
        return tuple(found)

    def _mounts(self, given: Mapping[str, tuple[ScalarNode, Node]]) -> tuple[Mount, ...]:
        """Return what the job's container sees beside its image."""
        found: list[Mount] = []
        self._places["container.mounts"] = given["mounts"][1].place if "mounts" in given else self._place, "mounts"
        for index, text in enumerate(self._texts(given, "mounts")):
            place, label = self._places[f"mounts[{index}]"]
            for part in ("source", "target"):
                self._places[f"container.mounts[{len(found)}].{part}"] = place, label
            try:
                found.append(parse_mount(text))
            except ValueError as error:
                self._fail(f"mounts[{index}]", place, label, str(error))
        return tuple(found)

    def _dependencies(self, given: Mapping[str, tuple[ScalarNode, Node]]) -> tuple[Dependency, ...]:
        """Return dependencies: a list of ids or names, with conditions in `after`, or one comma-separated text."""
        found: list[Dependency] = []
        for name, condition in AFTER.items():
            node = given[name][1] if name in given else ListNode(self._place, ())
            for item in node.items if isinstance(node, ListNode) else (node,):
                text = self._text(item, f"dependencies[{len(found)}].id", name)
                for word in [text] if isinstance(node, ListNode) else (text or "").split(","):
                    self._places[f"dependencies[{len(found)}].id"] = item.place, name
                    found.append(_dependency(word or "", condition))
        return tuple(found)

    def _command(self, given: Mapping[str, tuple[ScalarNode, Node]], wire: str, label: str) -> tuple[str, ...]:
        """Return a command: a list is run as is, a text by the shell."""
        if "command" not in given:
            return ()
        path, name = f"{wire}command", f"{label}command"
        node = given["command"][1]
        self._places[path] = node.place, name
        match node:
            case ListNode(items=items):
                words = [self._text(item, path, f"{name}[{index}]") for index, item in enumerate(items)]
                return tuple(word for word in words if word is not None)
            case ScalarNode(null=False):
                script = self._text(node, path, name)
                return () if script is None else (*SHELL, script)
        self._fail(path, node.place, name, f"must be a list of words or a shell command, not {kind_of(node)}")
        return ()

    def _pairs(self, given: Mapping[str, tuple[ScalarNode, Node]], name: str, wire: str) -> tuple[tuple[str, str], ...]:
        """Return the pairs of a map of texts."""
        if name not in given:
            return ()
        node = given[name][1]
        self._places[wire] = node.place, name
        if not isinstance(node, MapNode):
            self._fail(wire, node.place, name, f"must be a map of texts, not {kind_of(node)}")
            return ()
        pairs: dict[str, str] = {}
        for key, value in node.entries:
            path, label = f"{wire}[{shown(key.text)}]", f"{name}.{key.text}"
            self._places[path] = key.place, label
            if key.text in pairs:
                self._report(key.place, label, "duplicate key")
            text = self._text(value, path, label)
            if text is not None:
                pairs[key.text] = text
        return tuple(sorted(pairs.items()))

    def _with_env_files(self, given: Mapping[str, tuple[ScalarNode, Node]]) -> Mapping[str, tuple[ScalarNode, Node]]:
        """Return the fields with the variables of `env_file` in `env`."""
        if "env_file" not in given:
            return given
        key, node = given["env_file"]
        files = [env_variables(path, node.place, self.mistakes) for path in self._texts(given, "env_file")]
        name, variables = given.get("env", (key, MapNode(node.place, ())))
        if not isinstance(variables, MapNode):
            return given
        return {**given, "env": (name, with_env_files(files, variables))}

    def _text(self, node: Node, path: str, label: str) -> str | None:
        if isinstance(node, ScalarNode) and not node.null:
            if is_text(node.text):
                return node.text
            self._fail(path, node.place, label, "contains a character that cannot be encoded in UTF-8")
            return None
        empty = "value is missing; write '' for an empty text" if isinstance(node, ScalarNode) else ""
        self._fail(path, node.place, label, empty or f"must be a single value, not {kind_of(node)}")
        return None

    def _fail(self, path: str, place: SourcePosition, label: str, message: str) -> None:
        self._failed.add(path)
        self._report(place, label, message)

    def _report(self, place: SourcePosition, label: str, message: str) -> None:
        self.mistakes.append(Mistake(place, label, message))


def _with_plain_keys(node: Node) -> Node:
    """Return the document with keys such as `after-ok`, the spelling of options, as `after_ok`."""
    if not isinstance(node, MapNode):
        return node
    plain = [(key, key.text.replace("-", "_")) for key, _ in node.entries]
    keys = [replace(key, text=name) if name in JOB_FIELDS else key for key, name in plain]
    return replace(node, entries=tuple(zip(keys, (value for _, value in node.entries), strict=True)))


def _suggestion(name: str, known: Iterable[str]) -> str:
    other = OTHER_NAMES.get(name, "")
    return f"; did you mean {other}?" if other in known else did_you_mean(name, known)


def _dependency(word: str, condition: Condition) -> Dependency:
    """Return the dependency that a word of `after` or `after_ok` names.

    >>> _dependency("fail:0abc", Condition.AFTER)
    Dependency(job_id='0abc', condition=<Condition.AFTER_FAIL: 'after_fail'>)
    """
    before, colon, name = word.partition(":")
    if colon and condition is Condition.AFTER and (named := AFTER_CONDITIONS.get(before.strip())):
        return Dependency(name.strip(), named)
    return Dependency(word.strip(), condition)
