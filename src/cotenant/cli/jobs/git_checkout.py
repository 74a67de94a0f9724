"""Checks out a revision of a git repository on this machine, to be uploaded as the folder of a job."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.outcome import CommandError, note, usage_error

LABEL = "git-commit"
_SCP = re.compile(r"[^/]*?:")  # git@host:path
# No questions, and no transport that runs a command of the URL.
_SAFE = ("-c", "protocol.ext.allow=never", "-c", "advice.detachedHead=false")


class Source(NamedTuple):
    """A repository, and a branch, tag or commit of it; "" is the default branch."""

    url: str
    revision: str = ""


def parse_source(text: str) -> Source:
    """Return the repository and the revision in URL@REF; an @ before the path is part of the URL.

    >>> parse_source("https://github.com/ada/train@v1.2"), parse_source("git@host:ada/train")
    (Source(url='https://github.com/ada/train', revision='v1.2'), Source(url='git@host:ada/train', revision=''))
    >>> parse_source("ssh://git@host/ada/train@feature/x").revision
    'feature/x'

    Raises:
        CommandError: it is neither.
    """
    scheme, mark, rest = text.partition("://")
    if mark:
        path = len(scheme) + len(mark) + len(rest.partition("/")[0])
    else:
        path = found.end() if (found := _SCP.match(text)) else 0
    url, at, revision = text[path:].rpartition("@")
    source = Source(text[:path] + url, revision) if at else Source(text)
    if not source.url or (at and not revision) or any(word.startswith("-") for word in source):
        raise usage_error(f"--git must be URL or URL@REF, not {text!r}", hint="--git https://github.com/ada/train@main")
    return source


@contextmanager
def checked_out(text: str, drafts: list[Draft]) -> Iterator[list[Draft]]:
    """Check out URL@REF into a temporary folder, and yield the jobs with it as their upload.

    Without a text they are yielded as they are.

    Raises:
        CommandError: a job has another folder, or git cannot check it out.
    """
    if not text:
        yield drafts
        return
    source = parse_source(text)
    for draft in drafts:
        if draft.spec.upload or draft.spec.working_directory or draft.empty_workdir:
            raise usage_error(f"{draft.place}: --git cannot be combined with upload or workdir")
    with tempfile.TemporaryDirectory(prefix="cotenant-git-") as folder:
        commit = check_out(source, folder, os.environ)
        note(f"checked out {source.url} at {commit[:12]}")
        yield [_of(draft, folder, commit) for draft in drafts]


def _of(draft: Draft, folder: str, commit: str) -> Draft:
    spec = draft.spec.without_folder()
    labels = tuple(sorted({LABEL: commit, **dict(spec.labels)}.items()))
    return replace(draft, spec=replace(spec, upload=folder, labels=labels))


def check_out(source: Source, folder: str, environment: Mapping[str, str]) -> str:
    """Check out a revision into an empty folder; return its commit.

    Raises:
        CommandError: says what git said.
    """
    git = Git(folder, source, environment)
    git("init", "--quiet")
    git("fetch", "--quiet", "--depth=1", "--", source.url, source.revision or "HEAD")
    git("checkout", "--quiet", "--detach", "FETCH_HEAD")
    if os.path.exists(os.path.join(folder, ".gitmodules")):
        git("remote", "add", "origin", source.url)  # relative URLs of submodules begin there
        git("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1")
    return git("rev-parse", "HEAD").strip()


class Git:
    """Runs git in a folder, without asking for passwords."""

    def __init__(self, folder: str, source: Source, environment: Mapping[str, str]) -> None:
        self._folder, self._source = folder, source
        kept = {name: value for name, value in environment.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
        self._environment = {
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            **kept,
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }

    def __call__(self, *words: str) -> str:
        """Run git; return its output. Raises `CommandError`."""
        try:
            ended = subprocess.run(
                ["git", *_SAFE, *words], cwd=self._folder, env=self._environment, capture_output=True, text=True,
                errors="replace", check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except FileNotFoundError:
            raise CommandError("--git needs git on this machine", hint="install it, or use --upload DIR") from None
        if ended.returncode:
            raise self._error(words[0], ended.stderr)
        return ended.stdout

    def _error(self, step: str, said: str) -> CommandError:
        url, revision = self._source
        reason = next((line for line in said.splitlines() if line.startswith("fatal:")), said.strip() or "git failed")
        reason = reason.removeprefix("fatal: ")
        if "couldn't find remote ref" in reason or "not our ref" in reason:
            return usage_error(
                f"--git: {url} has no branch, tag or commit {revision or 'HEAD'}",
                hint=f"see what it has: git ls-remote {url}; commits need their full SHA-1",
            )
        if "terminal prompts disabled" in reason or "Authentication failed" in reason or "Permission denied" in said:
            return CommandError(
                f"--git: {url} needs a password or a key: {reason}", hint="set up a credential helper or an SSH agent"
            )
        return CommandError(f"--git: {step} of {url} failed: {reason}")
