"""Compile protos/ into cotenant/v1 when the package is built or installed for development."""

from __future__ import annotations

import shutil
import sysconfig
from importlib.resources import files
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def plugin(name: str) -> str:
    """Find a protoc plug-in of this build's own environment, whether or not it is on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise RuntimeError(f"{name} is missing: it comes with mypy-protobuf, which [build-system] requires")
    return found


def compile_protos(root: Path) -> None:
    """Write stubs and their types for every file under protos/ into src/cotenant/v1."""
    from grpc_tools import protoc

    target = root / "src" / "cotenant" / "v1"
    shutil.rmtree(target, ignore_errors=True)
    protos = sorted(str(path) for path in (root / "protos").rglob("*.proto"))
    command = [
        "protoc",
        f"--proto_path={root / 'protos'}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={plugin('protoc-gen-mypy_grpc')}",
        *(f"--{kind}_out={root / 'src'}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *protos,
    ]
    if protoc.main(command) != 0:
        raise RuntimeError("protoc refused a file under protos/; its message stands above")
    (target / "__init__.py").write_text('"""Compiled from protos/cotenant/v1 at build; never edited."""\n')


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own generic, unused here
    """Runs before the wheel's files are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the stubs and add them to the wheel, although git ignores them."""
        compile_protos(Path(self.root))
