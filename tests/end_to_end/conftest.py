"""Meshes for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.end_to_end.commands import Cli
from tests.end_to_end.meshes import Mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh shared by the tests of a module; each test restores its state."""
    shared = Mesh(tmp_path_factory.mktemp("mesh"))
    try:
        shared.start()
        yield shared
    finally:
        shared.close()


@pytest.fixture
def cli(mesh: Mesh) -> Cli:
    """The command line of the mesh's user."""
    return mesh.cli
