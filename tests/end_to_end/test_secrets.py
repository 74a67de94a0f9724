"""Secrets from the command line to a job's processes, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.end_to_end.commands import Cli
from tests.end_to_end.meshes import Mesh

VALUE = "hf_aVeryPrivateValue"
KEY = "-----BEGIN KEY-----\nlines of it\n-----END KEY-----\n"
SCRIPT = (
    'test "$HF_TOKEN" = "$(cat $COTENANT_SECRETS/copy)" && test "$OTHER" = "$HF_TOKEN" && '
    "stat -c '%a' $COTENANT_SECRETS/ssh/id && tail -n 2 $COTENANT_SECRETS/ssh/id && pwd && echo $COTENANT_SECRETS"
)


def test_a_job_gets_its_secrets_and_nothing_else_has_them(cli: Cli, mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(VALUE)
    (tmp_path / "key").write_text(KEY)
    cli("secrets", "set", "HF_TOKEN", "--from-file", str(tmp_path / "token"))
    assert "KEY of tenant default set (50B)" in cli("secrets", "set", "KEY", "--from-file", str(tmp_path / "key")).out
    uses = (
        "--secret",
        "HF_TOKEN",
        "--secret",
        "HF_TOKEN=OTHER",
        "--secret",
        "HF_TOKEN:copy",
        "--secret",
        "KEY:/ssh/id",
    )
    job_id = cli("submit", "--workdir", "none", "--cpus", "1", *uses, "--", "sh", "-c", SCRIPT).out.strip()
    cli("wait", job_id)
    mode, *key, work, directory = cli("logs", job_id).out.splitlines()
    assert (mode, key) == ("400", KEY.splitlines()[1:])
    assert not directory.startswith(work)
    assert not Path(directory).exists()
    shown = cli("show", job_id).out
    assert "HF_TOKEN, HF_TOKEN=OTHER, HF_TOKEN:copy, KEY:ssh/id" in shown
    assert json.loads(cli("jobs", "--json", "--all").out)[0]["secrets"] == [
        "HF_TOKEN", "HF_TOKEN=OTHER", "HF_TOKEN:copy", "KEY:ssh/id",
    ]  # fmt: skip
    for root, _, names in os.walk(mesh.directory):
        for name in names:
            path = Path(root, name)
            assert not path.is_file() or VALUE.encode() not in path.read_bytes(), path
    [listed] = [one for one in json.loads(cli("secrets", "--json").out) if one["name"] == "HF_TOKEN"]
    assert (listed["tenant"], listed["bytes"]) == ("default", len(VALUE))


def test_an_unknown_secret_is_refused_and_a_deleted_one_is_waited_for(cli: Cli, tmp_path: Path) -> None:
    refused = cli("submit", "--cpus", "1", "--secret", "NOWHERE", "--", "true", code=1).err
    assert "tenant default has no secret NOWHERE" in refused
    assert "cotenant secrets set NOWHERE" in refused
    assert "2ND" in cli("submit", "--cpus", "1", "--secret", "2ND", "--", "true", code=2).err
    (tmp_path / "value").write_text(VALUE)
    cli("secrets", "set", "SOON", "--from-file", str(tmp_path / "value"))
    words = ("--", "sh", "-c", "echo ${#SOON}")
    job_id = cli("submit", "--cpus", "1", "--hold", "--secret", "SOON", *words).out.strip()
    cli("secrets", "delete", "SOON")
    cli("resume", job_id)
    assert "waits for a secret: SECRETS: tenant default has no secret SOON" in cli("explain", job_id).out
    cli("secrets", "set", "SOON", "--from-file", str(tmp_path / "value"))
    cli("wait", job_id)
    assert cli("logs", job_id).out == f"{len(VALUE)}\n"
