"""A job takes its folder along to a node that does not see it, and its results come back."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.end_to_end.commands import Cli
from tests.end_to_end.meshes import Mesh

import cotenant

SCRIPT = """\
import os, pathlib
print(pathlib.Path("data/input.txt").read_text().strip(), oct(os.stat("run.sh").st_mode & 0o777), os.readlink("latest"))
pathlib.Path("out").mkdir()
for number in range(3):
    pathlib.Path(f"out/{number}.bin").write_bytes(bytes([number]) * 1_500_000)
pathlib.Path("out/to").symlink_to("0.bin")
pathlib.Path("out/away").symlink_to("/etc/passwd")
"""


def project_in(place: Path) -> Path:
    project = place / "project"
    (project / "data").mkdir(parents=True)
    (project / "train.py").write_text(SCRIPT)
    (project / "data" / "input.txt").write_text("forty-two\n")
    (project / "run.sh").write_text("exec python3 train.py\n")
    (project / "run.sh").chmod(0o750)
    (project / "latest").symlink_to("data/input.txt")
    (project / ".gitignore").write_text("*.ckpt\n")
    (project / "old.ckpt").write_bytes(b"x" * 100_000)
    return project


def test_a_folder_that_the_node_does_not_have_is_taken_along_and_results_come_back(
    cli: Cli, mesh: Mesh, tmp_path: Path
) -> None:
    cli.folder = project = project_in(tmp_path)
    job_id = cli("submit", "--upload", ".", "--cpus", "1", "--hold", "--", "sh", "run.sh").out.strip()
    shutil.rmtree(project)  # now no node has it
    cli.folder = tmp_path
    cli("resume", job_id)
    cli("wait", job_id)
    assert cli("logs", job_id).out == "forty-two 0o750 data/input.txt\n"
    listed = cli("files", job_id, "out").out
    assert "1.4MiB" in listed
    assert "out/to -> 0.bin" in listed
    assert "old.ckpt" not in cli("files", job_id).out
    cli("cp", f"{job_id}:out/2.bin", ".")
    assert (tmp_path / "2.bin").read_bytes() == b"\x02" * 1_500_000
    copied = cli("cp", f"{job_id}:", "all", code=1).err
    assert "out/away: is a link to /etc/passwd, outside" in copied
    assert sorted(os.listdir(tmp_path / "all" / "out")) == ["0.bin", "1.bin", "2.bin", "to"]
    assert (tmp_path / "all" / "run.sh").read_text() == "exec python3 train.py\n"
    assert os.listdir(tmp_path / "all" / "data") == ["input.txt"]


def test_a_node_that_has_the_folder_needs_no_copy_and_another_one_gets_it(cli: Cli, tmp_path: Path) -> None:
    cli.folder = project = project_in(tmp_path)
    words = ("--upload", "auto", "--cpus", "1", "--hold", "--", "sh", "-c", "pwd; cat data/input.txt")
    here, copied = (cli("submit", *words).out.strip() for _ in range(2))
    cli("resume", here)
    cli("wait", here)
    assert cli("logs", here).out == f"{project}\nforty-two\n"
    project.rename(tmp_path / "moved")
    cli.folder = tmp_path
    cli("resume", copied)
    cli("wait", copied)
    said = cli("logs", copied).out.splitlines()
    assert said[0].endswith("/work")
    assert said[1] == "forty-two"


def test_a_revision_of_a_repository_is_taken_along(cli: Cli, tmp_path: Path) -> None:
    project = project_in(tmp_path)
    own = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    for step in (("init", "-q"), ("add", "."), (*own, "commit", "-qm", "one"), ("tag", "v1")):
        subprocess.run(["git", *step], cwd=project, check=True)
    (project / "data/input.txt").write_text("later\n")
    ended = cli("submit", "--git", f"{project}@v1", "--cpus", "1", "--", "cat", "data/input.txt")
    job_id = ended.out.strip()
    cli("wait", job_id)
    assert cli("logs", job_id).out == "forty-two\n"
    assert "git-commit" in cli("show", job_id, "--json").out
    refused = cli("submit", "--git", f"{project}@v2", "--cpus", "1", "--", "true", code=2).err
    assert "has no branch, tag or commit v2" in refused
    assert "cannot be combined" in cli("submit", "--git", str(project), "--upload", ".", "--", "true", code=2).err


def test_what_is_wrong_is_told_before_anything_is_sent(cli: Cli, tmp_path: Path) -> None:
    cli.folder = tmp_path
    assert "nowhere does not exist" in cli("submit", "--upload", "nowhere", "--", "true", code=2).err
    assert "not both" in cli("submit", "--upload", ".", "--workdir", "/srv", "--", "true", code=2).err
    assert "names no file of a job" in cli("cp", "abc", ".", code=2).err
    (tmp_path / "away").symlink_to("/etc")
    refused = cli("submit", "--upload", ".", "--", "true", code=2).err
    assert "lead out of the folder" in refused
    assert "away -> /etc" in refused
    cli.folder = project_in(tmp_path)
    assert cli("submit", "--upload", ".", "--dry-run", "--", "true").out == "the job is valid\n"


def test_array_tasks_have_files_of_their_own_and_workdir_none_is_empty(cli: Cli, tmp_path: Path) -> None:
    cli.folder = tmp_path
    words = ("sh", "-c", "ls > files; echo $COTENANT_ARRAY_INDEX > index")
    array = cli("submit", "--workdir", "none", "--array", "2-3", "--cpus", "1", "--", *words).out.strip()
    cli("wait", array)
    cli("cp", f"{array}_3:index", "three")
    cli("cp", f"{array}_2:files", "files")
    assert (tmp_path / "three").read_text() == "3\n"
    assert (tmp_path / "files").read_text() == "files\n"


def test_a_python_program_takes_its_folder_along(mesh: Mesh, cli: Cli, tmp_path: Path) -> None:
    project = project_in(tmp_path)
    with cotenant.Client(state_dir=mesh.state_dir) as client:
        client.validate(["sh", "run.sh"], cpus=1, upload=project)
        job = client.submit(["sh", "run.sh"], cpus=1, upload=project)
        job.wait()
    assert cli("logs", job.id).out == "forty-two 0o750 data/input.txt\n"
