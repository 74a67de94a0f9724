"""The notebooks of the documentation run as they are, on a live mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "notebooks"
# of JupyterLab, which brings a kernel and nbclient; none if `make test-jupyter` has not installed it
JUPYTER = next((ROOT / ".cotenant" / "jupyter" / "lib").glob("python*/site-packages"), None)
IN_JUPYTER = """
import sys, nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.argv[1], 4)
NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
for cell in book.cells:
    if cell.cell_type == "code":
        print(cell.execution_count, [one.output_type for one in cell.outputs])
"""
SECONDS_MAX = 300.0
NOTEBOOKS = {  # one per kind of user; deep: those that mostly simulate
    "submitting": (),
    "calling": (),
    "operating": (pytest.mark.deep,),
    "policies": (pytest.mark.deep,),
    "research": (pytest.mark.deep,),
}


def run(mesh: Mesh, *notebooks: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run notebooks against a mesh, without keeping their outputs."""
    return subprocess.run(
        [sys.executable, "-m", "tools.notebooks", "--check", *map(str, notebooks)],
        cwd=ROOT,
        env={**os.environ, "COTENANT_STATE_DIR": str(mesh.state_dir)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=check,
    )


@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in NOTEBOOKS.items()])
def test_a_notebook_runs(mesh: Mesh, name: str) -> None:
    before = (FOLDER / f"{name}.ipynb").read_bytes()
    done = run(mesh, FOLDER / f"{name}.ipynb", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (FOLDER / f"{name}.ipynb").read_bytes() == before


@pytest.mark.skipif(JUPYTER is None, reason="Jupyter is not installed; see `make test-jupyter`")
@pytest.mark.timeout(SECONDS_MAX)
@pytest.mark.parametrize("name", ["submitting", "calling"])
def test_a_notebook_runs_in_jupyter(mesh: Mesh, name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_JUPYTER, str(FOLDER / f"{name}.ipynb"), str(tmp_path)],
        env={**os.environ, "COTENANT_STATE_DIR": str(mesh.state_dir), "PYTHONPATH": str(JUPYTER)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stdout


def test_a_cell_that_fails_is_named(mesh: Mesh, tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": [line], "outputs": []} for line in ("ten = 10", "ten / 0")]
    (tmp_path / "bad.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    done = run(mesh, tmp_path / "bad.ipynb", check=False)
    assert done.returncode == 1
    assert "bad.ipynb: cell 2:\nten / 0\n" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_notebooks_are_kept_with_what_they_show() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)
    for path in FOLDER.glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path.name
        assert any(cell["outputs"] for cell in cells), path.name
