"""The options of `serve slurm` about what it changes, and the script for slurmctld."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.cli.mesh.slurm_acts import ActOptions, read_acts, script
from cotenant.cli.outcome import CommandError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ActOptions(acts=("core",)), "--act must be cores, order or nodes, not 'core'"),
        (ActOptions(acts=("cpusets",)), "run `cotenant slurm-bridge node --act cpusets` on each"),
        (ActOptions(acts=("cores",), nodes_by="fgd"), "--nodes-by must be used with --act nodes"),
        (ActOptions(dry_run=True), "--dry-run must be used with --act cores or --act order"),
        (ActOptions(acts=("order",), override=True), "--override-cpus must be used with --act cores"),
        (ActOptions(acts=("cores",), weight=5), "--order-weight must be used with --act order"),
        (ActOptions(acts=("order",), weight=0), "--order-weight must be between 1 and"),
        (ActOptions(acts=("cores",), cpus_per_gpu=0), "--cpus-per-gpu must be between 1 and"),
        (ActOptions(interval="1x"), "--interval must be a duration"),
        (ActOptions(interval="100ms"), "--interval must be 0.5 s or more, not 100ms"),
    ],
)
def test_invalid_options_are_named(options: ActOptions, words: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=words):
        read_acts(options, tmp_path)


def test_nothing_is_changed_by_default(tmp_path: Path) -> None:
    config, interval_seconds = read_acts(ActOptions(), tmp_path)
    assert config.acts == frozenset()
    assert interval_seconds == 5.0
    assert ActOptions().given() == []
    assert ActOptions(acts=("order",), weight=0).given() == ["--act", "--order-weight"]


@pytest.mark.parametrize("path", ["table", '/a"b', "/a\\b", "/a\nb"])
def test_a_path_that_cannot_stand_in_the_script_is_refused(path: str) -> None:
    with pytest.raises(CommandError, match="--table must be an absolute path"):
        script(Path(path))


def test_the_script_reads_the_table() -> None:
    assert 'local TABLE = "/var/lib/cores table"\n' in script(Path("/var/lib/cores table"))
