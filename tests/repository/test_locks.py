"""The lock files: what pyproject.toml asks for, in exact versions with hashes. `make lock` renews them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.support.paths import ROOT

LOCKS = ROOT / "locks"
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, EXTRAS = CONFIG["project"], CONFIG["project"]["optional-dependencies"]
ROLES = [extra for extra in EXTRAS if extra not in ("all", "research")]
EVERYTHING = [one for extra in EXTRAS if extra != "all" for one in EXTRAS[extra]]
ASKED = {
    "build": CONFIG["build-system"]["requires"],
    "client": PROJECT["dependencies"],
    "dev": [*PROJECT["dependencies"], *EVERYTHING, *CONFIG["dependency-groups"]["dev"]],
    **{role: [*PROJECT["dependencies"], *EXTRAS[role]] for role in ROLES},
}


def locked(name: str) -> dict[str, Version]:
    """Return the versions in a lock file for this Python and platform."""
    found = [Requirement(line) for line in lines(name)]
    return {
        canonicalize_name(one.name): Version(str(one.specifier).removeprefix("=="))
        for one in found
        if one.marker is None or one.marker.evaluate()
    }


def lines(name: str) -> Iterator[str]:
    """Yield the requirements of a lock file, without their hashes."""
    for line in joined(name):
        yield line.partition(" --hash")[0].strip()


def joined(name: str) -> list[str]:
    """Return the lines of a lock file, one for each requirement, without comments."""
    text = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


def test_there_is_a_lock_for_each_role_and_nothing_else() -> None:
    assert {path.stem for path in LOCKS.iterdir()} == set(ASKED)


@pytest.mark.parametrize("name", ASKED)
def test_a_lock_has_what_pyproject_asks_for(name: str) -> None:
    versions = locked(name)
    for text in ASKED[name]:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate():
            version = versions.get(canonicalize_name(asked.name))
            assert version, f"{asked.name}: run `make lock`"
            assert asked.specifier.contains(version, prereleases=True), f"{asked}, not {version}: run `make lock`"


@pytest.mark.parametrize("name", ASKED)
def test_every_version_is_exact_and_has_hashes_but_no_address(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert "://" not in text
    assert [line for line in joined(name) if not re.match(r"\S+==\S+ .*--hash=sha256:[0-9a-f]{64}", line)] == []


@pytest.mark.parametrize("role", ["client", *ROLES])
def test_images_have_the_versions_that_are_tested(role: str) -> None:
    tested = locked("dev")
    assert {name: version for name, version in locked(role).items() if tested.get(name) != version} == {}
