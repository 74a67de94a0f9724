"""The wheel, and environments with it, made once for all workers of a test run."""

from __future__ import annotations

import compileall
import fcntl
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path
from typing import Literal

import pytest
from build import ProjectBuilder
from build.env import DefaultIsolatedEnv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pyproject_hooks import quiet_subprocess_runner
from tests.support.paths import ROOT

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "dist", "build", "__pycache__", ".*_cache", ".hypothesis")
STUBS = set(re.findall(r"^/src/cotenant/(\w+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE))


def _ignored(directory: str, names: list[str]) -> set[str]:
    """Ignore what git ignores: caches, environments, and the stubs, which the build must generate."""
    return set(NOT_COPIED(directory, names)) | (STUBS if Path(directory) == ROOT / "src" / "cotenant" else set())


@contextmanager
def made_once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a directory that all processes share, and whether it is already made; the others wait meanwhile."""
    place = factory.getbasetemp() / name
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place.with_suffix(".done")
        yield place, done.exists()
        done.touch()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from a copy of the tree, because the build writes stubs into it, and a wheel from the sdist."""
    with made_once(tmp_path_factory, "build") as (place, is_made):
        if not is_made:
            shutil.copytree(ROOT, place / "tree", symlinks=True, ignore=_ignored)
            with DefaultIsolatedEnv(installer="uv" if shutil.which("uv") else "pip") as environment:
                environment.install(ProjectBuilder(place / "tree").build_system_requires)
                sdist = _build("sdist", place / "tree", place / "dist", environment)
                shutil.unpack_archive(sdist, place / "unpacked")
                (unpacked,) = (place / "unpacked").iterdir()
                _build("wheel", unpacked, place / "dist", environment)
    return place / "dist"


def _build(kind: Literal["sdist", "wheel"], tree: Path, output: Path, environment: DefaultIsolatedEnv) -> Path:
    """Build a distribution as `python -m build` does, in an environment that several builds share."""
    builder = ProjectBuilder.from_isolated_env(environment, tree, runner=quiet_subprocess_runner)
    environment.install(builder.get_requires_for_build(kind))
    return Path(builder.build(kind, output))


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """Return the wheel."""
    (wheel,) = built.glob("*.whl")
    return wheel


def _install(wheel: Path, environment: Path) -> None:
    """Install the wheel into a new environment, with its requirements, as an installer compiles them."""
    packages = _make_environment(environment)
    _link_requirements(wheel, "", packages)
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    compileall.compile_dir(packages, quiet=1)  # uv leaves it to the first import


def _install_again(plain: Path, wheel: Path, extra: str, environment: Path) -> None:
    """Install the wheel into another new environment, with the requirements of an extra too, from a plain one."""
    packages = _make_environment(environment)
    _link_requirements(wheel, extra, packages)
    (cotenant,) = distributions(name="cotenant", path=[str(_packages(plain))])
    _link(cotenant, packages)
    command = environment / "bin" / "cotenant"
    command.write_text((plain / "bin" / "cotenant").read_text().replace(str(plain), str(environment)))
    command.chmod(0o755)


def _make_environment(environment: Path) -> Path:
    """Make an empty environment and return its folder of packages."""
    venv.create(environment, symlinks=True)
    return _packages(environment)


def _packages(environment: Path) -> Path:
    (packages,) = (environment / "lib").glob("python*/site-packages")
    return packages


def _link_requirements(wheel: Path, extra: str, packages: Path) -> None:
    """Link what a wheel needs, with an extra or without one, and nothing else, into a folder of packages.

    It is what is installed here, in the versions of locks/: nothing is downloaded, unpacked or compiled again.
    """
    (metadata,) = distributions(path=[str(wheel)])
    for needed in _closure(_needed(metadata, {extra} - {""})).values():
        _link(needed, packages)


def _closure(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """Return what is installed here of these requirements and all that they require, by name.

    Fails if a requirement is missing here, or is installed in a version that it does not allow.
    """
    found: dict[str, Distribution] = {}
    seen, waiting = set[str](), list(wanted)
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        installed = distribution(requirement.name)
        assert requirement.specifier.contains(installed.version, prereleases=True), (requirement, installed.version)
        found[canonicalize_name(requirement.name)] = installed
        waiting += _needed(installed, requirement.extras)
    return found


def _needed(by: Distribution, extras: Collection[str]) -> list[Requirement]:
    """Return what a distribution requires with these extras on this machine."""
    listed = [Requirement(text) for text in by.requires or ()]
    return [
        one
        for one in listed
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or {""})
    ]


def _link(installed: Distribution, packages: Path) -> None:
    """Link the modules and data of a distribution, with what is compiled of them, into another folder of packages."""
    for file in installed.files or ():
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        source, place = Path(str(file.locate())), packages / file
        _link_file(source, place)
        if file.suffix == ".py" and (compiled := Path(cache_from_source(source))).exists():
            _link_file(compiled, Path(cache_from_source(place)))


def _link_file(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, place)
    except OSError:  # another file system
        shutil.copy2(source, place)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes an environment of the wheel with an extra, and returns its directory of commands."""

    def install(extra: str) -> Path:
        with made_once(tmp_path_factory, f"venv-{extra or 'plain'}") as (place, is_made):
            if not is_made and extra:
                _install_again(install("").parent, wheel, extra, place)
            elif not is_made:
                _install(wheel, place)
        return place / "bin"

    return install
