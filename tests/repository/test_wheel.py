"""The mapping from directories to packages breaks silently, so these tests check the wheel file by file."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests.support.paths import ROOT

LINKED = ("services", "policies", "node_agent")
GENERATED = ("v1", "agent", "internal", "storage")  # compiled from protos/
PAGES = ROOT / "src" / "cotenant" / "web" / "static"  # of which scripts and styles are packed
PLAIN = ("tables.js",)  # which reports read too
PRIVATE = ("internal", "storage")  # without types: messages between services, and records in the store

pytestmark = pytest.mark.timeout(300)  # the build downloads its tools


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


@pytest.fixture(scope="module")
def sdist_names(built: Path) -> list[str]:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        return [name.partition("/")[2] for name in opened.getnames()]


def test_the_wheel_contains_each_file_of_the_package_once_and_nothing_else(wheel_names: list[str]) -> None:
    metadata = {name for name in wheel_names if name.partition("/")[0].endswith(".dist-info")}
    assert sorted(set(wheel_names) - metadata) == sorted({*_files_of_the_package(), *_stubs()})
    assert [name for name, count in Counter(wheel_names).items() if count > 1] == []


def _files_of_the_package() -> Iterator[str]:
    for base, package in (
        (ROOT / "src" / "cotenant", "cotenant"),
        (ROOT / "src" / "hydra_plugins", "hydra_plugins"),
        *((ROOT / name, f"cotenant/{name}") for name in LINKED),
    ):
        for path in base.rglob("*"):
            relative = path.relative_to(base)
            if path.is_file() and "__pycache__" not in path.parts and relative.parts[0] not in (*LINKED, *GENERATED):
                packed = (
                    ".gz" if path.parent == PAGES and path.suffix in (".js", ".css") and path.name not in PLAIN else ""
                )
                yield f"{package}/{relative.as_posix()}{packed}"


def _stubs() -> Iterator[str]:
    yield from (f"cotenant/{package}/__init__.py" for package in GENERATED)
    for proto in (ROOT / "protos").rglob("*.proto"):
        package = proto.parent.relative_to(ROOT / "protos")
        if package.parts[1] != package.name:
            yield f"{package}/__init__.py"
        kinds = ("_pb2", "_pb2_grpc") if "\nservice " in proto.read_text() else ("_pb2",)
        endings = (".py",) if package.parts[1] in PRIVATE else (".py", ".pyi")
        yield from (f"{package}/{proto.stem}{kind}{ending}" for kind in kinds for ending in endings)


def test_the_wheel_has_the_typing_marker_and_the_license(wheel_names: list[str]) -> None:
    assert "cotenant/py.typed" in wheel_names
    assert [name for name in wheel_names if name.endswith(".dist-info/licenses/LICENSE")]


def test_entry_points_can_be_imported_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
        (listed,) = [name for name in opened.namelist() if name.endswith("entry_points.txt")]
    points = [
        EntryPoint(name.strip(), value.strip(), "")
        for name, _, value in (line.partition("=") for line in (tmp_path / listed).read_text().splitlines())
        if value
    ]
    modules = sorted({point.module for point in points})
    assert "cotenant.cli.main" in modules
    script = (
        f"import importlib, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"for name in {modules}: assert importlib.import_module(name).__file__.startswith({str(tmp_path)!r}), name"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_sdist_contains_what_a_build_needs_and_no_stubs(sdist_names: list[str]) -> None:
    assert {"hatch_build.py", "pyproject.toml", "protos/cotenant/v1/job.proto", "LICENSE"} <= set(sdist_names)
    assert [
        name
        for name in sdist_names
        if name.startswith((".venv", ".git/", *(f"src/cotenant/{package}/" for package in GENERATED)))
    ] == []
    assert [name for name, count in Counter(sdist_names).items() if count > 1] == []
