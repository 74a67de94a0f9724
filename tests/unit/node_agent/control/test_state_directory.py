from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant.node_agent.control.state_directory import StateNotWritable, open_state_directory


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateNotWritable, match=r"the state directory .*/file/state cannot be written: Not a directory"):
        open_state_directory(tmp_path / "file" / "state", "n1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_agent_on_a_read_only_disk_ends_with_one_sentence(tmp_path: Path) -> None:
    script = f"mount -t tmpfs -o ro none {tmp_path} && exec {sys.executable} -c '{PROGRAM}' {tmp_path}/state"
    ended = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout == f"the state directory {tmp_path}/state cannot be written: Read-only file system\n"


PROGRAM = """
import pathlib, sys
from cotenant.node_agent.control.state_directory import StateNotWritable, open_state_directory
try:
    open_state_directory(pathlib.Path(sys.argv[1]), "n1")
except StateNotWritable as error:
    print(error)
"""
