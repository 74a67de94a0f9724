"""Policies of other packages, from `cotenant policies new` to the laws that hold for every policy.

The packages are on the path with the metadata that pip would write, which takes no time, instead of being installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.paths import ROOT

from cotenant.cli.mesh.new_policy import KINDS, package

pytestmark = pytest.mark.timeout(900)  # pytest runs within, and mypy may have to read everything

FEW = """
from hypothesis import Phase, settings

settings.register_profile("few", max_examples=10, phases=[one for one in Phase if one is not Phase.explain])
settings.load_profile("few")
"""
BAD = '''
import time
from dataclasses import dataclass

import numpy as np

from cotenant.core.policy.protocols import Order


class Hurried:
    """Reads the clock."""

    name = "hurried"
    api_version = 1
    preemptive = strict = running_first = False

    def order(self, jobs, now):
        score = np.full(len(jobs), round(time.time() / 1e9))
        return Order(level=np.zeros(len(jobs), dtype=np.int64), score=score)


class Twice:
    """Returns the first job twice."""

    name = "twice"
    api_version = 1
    preemptive = strict = running_first = False

    def order(self, jobs, now):
        score = np.concatenate([jobs.arrival_seconds, jobs.arrival_seconds[:1]])
        return Order(level=np.zeros(len(score), dtype=np.int64), score=score)


class Dice(Hurried):
    """Draws chance of its own."""

    name = "dice"

    def order(self, jobs, now):
        score = np.random.rand(len(jobs))
        return Order(level=np.zeros(len(jobs), dtype=np.int64), score=score)


class Unchecked(Twice):
    """Takes any number."""

    name = "unchecked"

    @dataclass(frozen=True)
    class Options:
        """How much.

        weight: any number.
        """

        weight: float = 1.0

    def __init__(self, options=None):
        self.options = options or self.Options()


class Old:
    """Is of another version of the API."""

    name = "old"
    api_version = 2
    order = Twice.order
'''

BAD_RUNTIMES = """
from cotenant.node_agent.runtime.process_runtime import ProcessRuntime


class Twice(ProcessRuntime):
    name = "told-twice"

    async def open(self, context, changed):
        def twice(status):
            changed(status)
            changed(status)

        return await super().open(context, twice)


class Deaf(ProcessRuntime):
    name = "deaf"

    def stop(self, key, grace_seconds, reason=""):
        super().stop(key, 0.0)


class Half:
    name = "half"
    api_version = 1

    async def open(self, context, changed):
        return []
"""


def install(site: Path, files: Mapping[str, str]) -> None:
    """Write the files of a package, and the metadata of its installation."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    for group, points in project["entry-points"].items():
        lines = [f"{name} = {target}" for name, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a new policy of each group, and a package of policies that break laws."""
    site = tmp_path_factory.mktemp("site")
    for group in KINDS:
        install(site, package(group, f"new-{group}"))
    (site / "pyproject.toml").unlink()
    names = "".join(
        f'{name} = "bad:{name.capitalize()}"\n' for name in ("hurried", "twice", "dice", "unchecked", "old")
    )
    points = f'[project.entry-points."cotenant.queue_policies"]\n{names}'
    install(site, {"bad.py": BAD, "pyproject.toml": f'[project]\nname = "bad"\nversion = "0.1"\n{points}'})
    (site / "pyproject.toml").unlink()
    points = (
        '[project.entry-points."cotenant.runtimes"]\ntold-twice = "bad_runtimes:Twice"\n'
        'deaf = "bad_runtimes:Deaf"\nhalf = "bad_runtimes:Half"\n'
    )
    project = f'[project]\nname = "bad-runtimes"\nversion = "0.1"\n{points}'
    install(site, {"bad_runtimes.py": BAD_RUNTIMES, "pyproject.toml": project})
    (site / "pyproject.toml").unlink()
    (site / "conftest.py").write_text(FEW)
    return site


def pytested(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as the author of a policy does."""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("CI", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *words]
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.deep
def test_new_policies_pass_their_own_tests_and_keep_all_laws(site: Path) -> None:
    named = [word for group in KINDS for word in ("--policy", f"new-{group}")]
    own = [f"new_{group}" for group in KINDS]
    done = pytested(site, "--doctest-modules", "--pyargs", "cotenant.conformance", *named, "tests", *own)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_policy_that_breaks_a_law_fails_with_the_law_and_the_smallest_world(site: Path) -> None:
    laws = "test_no_clock or finite_score or no_chance or numeric_option_is_checked"
    named = [word for name in ("hurried", "twice", "dice", "unchecked") for word in ("--policy", name)]
    done = pytested(site, "--pyargs", "cotenant.conformance", *named, "-k", laws)
    assert done.returncode == 1, done.stdout + done.stderr
    for law in (
        "Law: A policy reads no clock and does not wait: the present time is an argument.\n"
        "Broken by hurried of bad 0.1: it called time.time()",
        "Law: Every job gets one finite score, which does not depend on the order of the rows; the jobs are left "
        "unchanged.\nBroken by twice of bad 0.1: ",
        "Law: A policy draws no chance of its own: what may be random comes from the generator that it is given.\n"
        "Broken by dice of bad 0.1: it called numpy.random.rand()",
        "Law: A policy with numeric options checks them: its `Options` have a method `check` that yields violations.\n"
        "Broken by unchecked of bad 0.1: any number is accepted for weight: yield Violation(",
    ):
        assert law in done.stdout
    assert " failed, " in done.stdout
    assert "table=JobTable(capacity=(0, 0, 0, 0), now=10000:\n    job0, arrival_seconds=0.0, " in done.stdout


def test_what_cannot_be_held_to_laws_is_named_before_anything_runs(site: Path) -> None:
    done = pytested(site, "--pyargs", "cotenant.conformance", "--policy", "old", "--policy", "twise")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "'old' of bad uses version 2 of the policy API; this Cotenant supports version 1" in done.stderr
    assert "no policy 'twise' is installed; did you mean twice?" in done.stderr


@pytest.mark.deep
def test_a_runtime_that_breaks_a_law_fails_with_the_law(site: Path) -> None:
    named = ("--policy", "told-twice", "--policy", "deaf", "--policy", "half")
    done = pytested(site, "--pyargs", "cotenant.conformance", *named, "-k", "reported_once or warned_first")
    assert done.returncode == 4, done.stdout + done.stderr
    assert "the policy 'half' of bad-runtimes lacks not_enforced(), launch(), stop()" in done.stderr
    done = pytested(site, "--pyargs", "cotenant.conformance", *named[:4], "-k", "reported_once or warned_first")
    assert done.returncode == 1, done.stdout + done.stderr
    for law in (
        "Law: An attempt is reported as running, and its end exactly once: with success, the exit code, or the "
        "signal.\nBroken by told-twice of bad-runtimes 0.1: ",
        "Law: A stop warns the program, which may end by itself within the grace period; the end names the reason.\n"
        "Broken by deaf of bad-runtimes 0.1: ",
    ):
        assert law in done.stdout
    assert "2 failed, 2 passed" in done.stdout


@pytest.mark.deep
def test_new_packages_have_no_faults_of_style_or_type(site: Path) -> None:
    """Types are checked with the settings and the cache of this repository, which are as strict."""
    folders = [str(site / f"new_{group}") for group in KINDS] + [str(site / "tests")]
    style = tomllib.loads(package("queue", "a")["pyproject.toml"])["tool"]["ruff"]
    (site / "ruff.toml").write_text(
        f"line-length = {style['line-length']}\n[lint]\nextend-select = {style['lint']['extend-select']}\n"
    )
    environment = {**os.environ, "MYPYPATH": str(site)}
    for cwd, words in (
        (site, ["ruff", "check", "--no-cache", *folders]),
        (site, ["ruff", "format", "--no-cache", "--check", "--diff", *folders]),
        (ROOT, ["mypy", "--strict", *folders]),
    ):
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
