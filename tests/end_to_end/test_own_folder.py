"""The first thing that a user tries: a script of their own folder, with what is installed there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.end_to_end.commands import Cli

SCRIPT = """\
import os, helper, pathlib
print(helper.NAME, os.getcwd(), os.environ["VIRTUAL_ENV"], os.environ["COTENANT_SUBMIT_DIR"])
pathlib.Path("model.bin").write_text("weights")
"""


def test_a_script_of_the_current_folder_runs_there(cli: Cli, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "bin").mkdir(parents=True)
    (project / "train.py").write_text(SCRIPT)
    (project / "helper.py").write_text("NAME = 'helper'\n")
    python = project / "bin" / "python-of-the-project"
    python.symlink_to(sys.executable)
    cli.folder = project
    path = f"{project}/bin:{os.environ['PATH']}"
    ended = cli("submit", "--gpus", "1", "--wait", "--", python.name, "train.py", PATH=path, VIRTUAL_ENV=str(project))
    assert ended.out == f"helper {project} {project} {project}\n"
    assert (project / "model.bin").read_text() == "weights"
