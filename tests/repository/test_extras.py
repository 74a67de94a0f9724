"""The extras of the package: each has what its role needs, and a plain installation stays small and says what it lacks.

The wheel is installed into an environment of its own for each extra, with that extra's requirements only. The parts of
one mesh then run from four of them, so that no part can use a module that another part's extra brings.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.end_to_end.waiting import until
from tests.support.etcd_server import free_ports
from tests.support.paths import ROOT

from cotenant import extras
from cotenant.cli.application import ENTRIES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BYTES_MAX = 60e6
NOT_OURS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")
SERVICES = ("queue", "placement", "predictor", "contention")
SECONDS_MAX = 90.0

pytestmark = pytest.mark.timeout(300)  # the build downloads its tools

Install = Callable[[str], Path]


def requirements(extra: str) -> dict[str, Requirement]:
    listed = [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]
    return {canonicalize_name(one.name): one for one in listed}


BASE = {canonicalize_name(Requirement(text).name): Requirement(text) for text in PROJECT["dependencies"]}
ROLES = sorted(set(PROJECT["optional-dependencies"]) - {"all"})


# What is declared ---------------------------------------------------------------------------------------------------


def test_all_brings_every_extra() -> None:
    assert PROJECT["optional-dependencies"]["all"] == [f"cotenant[{','.join(ROLES)}]"]
    assert sorted(extras.MODULES) == ROLES


@pytest.mark.parametrize("extra", ROLES)
def test_the_modules_of_an_extra_are_those_of_its_requirements(extra: str) -> None:
    declared = set(requirements(extra)) - set(BASE)
    owners = packages_distributions()
    found = {module: {canonicalize_name(name) for name in owners.get(module, ())} for module in extras.MODULES[extra]}
    assert [module for module, names in found.items() if not names & declared] == []
    assert declared - set().union(*found.values()) == set()
    assert set(extras.PREFERRED) == set(extras.MODULES)


def test_a_requirement_has_the_same_versions_in_every_extra() -> None:
    seen: dict[str, set[str]] = {}
    for extra in ROLES:
        for name, one in requirements(extra).items():
            seen.setdefault(name, set()).add(str(one.specifier))
    assert {name: texts for name, texts in seen.items() if len(texts) > 1} == {}


# What is installed --------------------------------------------------------------------------------------------------


def run(program: Path, *words: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "COTENANT_STATE_DIR": str(home / "state"), **variables}
    return subprocess.run(
        [program, *words], cwd=home, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


@pytest.mark.deep
def test_a_plain_installation_is_small(installed: Install) -> None:
    (packages,) = (installed("").parent / "lib").glob("python*/site-packages")
    sizes: dict[str, int] = {}
    for path in packages.rglob("*"):
        top = path.relative_to(packages).parts[0]
        if path.is_file() and top.partition("-")[0] not in NOT_OURS:
            sizes[top] = sizes.get(top, 0) + path.stat().st_size
    assert sum(sizes.values()) <= BYTES_MAX, sorted(sizes.items(), key=lambda one: -one[1])[:12]


@pytest.mark.deep
def test_a_job_reports_progress_without_any_dependency(installed: Install, tmp_path: Path) -> None:
    script = "import sys; from cotenant import progress; progress.step(loss=1); print(*sys.modules)"
    done = run(installed("") / "python", "-c", script, home=tmp_path)
    assert done.returncode == 0, done.stderr
    tops = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert {name for name in tops if not name.startswith("__")} - set(NOT_OURS) == {"cotenant"}


@pytest.mark.deep
def test_every_command_explains_itself_in_a_plain_installation(installed: Install, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom cotenant.cli.application import ENTRIES\nfrom cotenant.cli.main import run\n"
        "print(file=sys.stderr)\n"
        "for entry in ENTRIES:\n    if code := run([entry.name, '--help']): sys.exit(f'{entry.name}: {code}')"
    )
    done = run(installed("") / "python", "-c", script, home=tmp_path)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout.lower().count("usage: cotenant ") >= len(ENTRIES)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("up", "agent,server"),
        ("demo", "agent,server"),
        ("serve agent", "agent"),
        ("serve queue", "server"),
        ("certs init", "server"),
        ("backup copy", "server"),
        ("simulate --trace sample --cluster 2x8", "research"),
        ("compare --trace sample --cluster 2x8 --arms fifo,las", "research"),
        ("reproduce coda --quick", "research"),
        ("predict fit rates.csv", "research"),
        ("predict fit rates.csv --plot rates.png", "research"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(words: str, needed: str, installed: Install, tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("cores,rate\n1,9\n2,18\n4,35\n8,60\n")
    done = run(installed("") / "cotenant", *words.split(), home=tmp_path)
    error, *others = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert error.startswith("error: ")
    assert others == [f"hint: pip install 'cotenant[{needed}]'"]
    assert not (tmp_path / "state").exists()


@pytest.mark.deep
def test_the_reports_of_research_need_only_their_extra(installed: Install, tmp_path: Path) -> None:
    words = ["compare", "--trace", "sample", "--cluster", "2x8", "--arms", "fifo,las", "--report", "report.html"]
    done = run(installed("research") / "cotenant", *words, home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000


def log_has(path: Path, words: str) -> bool:
    return words in path.read_text()


@pytest.fixture
def mesh(installed: Install, tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run services and an agent from their own environments; yield a client in a plain one."""
    ports = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
    endpoints = ",".join(f"{name}=127.0.0.1:{port}" for name, port in ports.items())
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "COTENANT_STATE_DIR": str(tmp_path / "state")}
    server, agent, client = (installed(extra) / "cotenant" for extra in ("server", "agent", ""))
    commands = [
        *(f"{server} serve {name} --listen 127.0.0.1:{port}" for name, port in ports.items()),
        f"{agent} serve agent --node n1 --gpus fake:1 --share-machine",
    ]
    (tmp_path / "logs").mkdir()
    running = []
    for number, command in enumerate(commands):
        words = [*command.split(), "--endpoints", endpoints]
        with (tmp_path / "logs" / str(number)).open("w") as log:
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    try:

        def healthy() -> bool:
            assert [process.poll() for process in running] == [None] * len(running)
            return run(client, "--endpoint", endpoints, "health", home=tmp_path).returncode == 0

        for number, line in enumerate([*["serves at"] * len(SERVICES), "placement_connected"]):
            own = tmp_path / "logs" / str(number)
            until(partial(log_has, own, line), f"{line!r} in {own}", seconds=SECONDS_MAX)
        until(healthy, "health", seconds=SECONDS_MAX)
        yield lambda *words: run(client, "--endpoint", endpoints, *words, home=tmp_path)
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait(30)


@pytest.mark.deep
def test_a_mesh_runs_a_job_with_each_part_in_its_own_installation(
    mesh: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = mesh("submit", "--cpus", "1", "--gpus", "1", "--wait", "--", "echo", "from the job")
    logs = "".join(path.read_text() for path in sorted((tmp_path / "logs").iterdir()))
    assert (done.returncode, "from the job" in done.stdout) == (0, True), done.stderr + logs
    assert not re.search(r"ModuleNotFoundError|not installed", logs)
    (job,) = json.loads(mesh("jobs", "--all", "--json").stdout)
    assert job["phase"] == "succeeded"
