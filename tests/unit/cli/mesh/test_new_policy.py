"""`cotenant policies new`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell

from cotenant.cli.mesh.new_policy import KINDS
from cotenant.plugins import POLICY_GROUPS


def test_every_group_has_a_template() -> None:
    assert set(KINDS) == set(POLICY_GROUPS)


def test_a_package_is_written_with_its_entry_point(shell: Shell, tmp_path: Path) -> None:
    done = shell("policies", "new", "queue", "small-first", "--dir", str(tmp_path))
    assert (done.code, done.err) == (0, "")
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert written == [
        "small-first/README.md",
        "small-first/pyproject.toml",
        "small-first/small_first/__init__.py",
        "small-first/small_first/policy.py",
        "small-first/small_first/py.typed",
        "small-first/tests/test_small_first.py",
    ]
    assert all(str(tmp_path / path) in done.out for path in written)
    project = (tmp_path / "small-first/pyproject.toml").read_text()
    assert '[project.entry-points."cotenant.queue_policies"]\nsmall-first = "small_first.policy:SmallFirst"' in project


def test_every_invalid_argument_is_named(shell: Shell, tmp_path: Path) -> None:
    done = shell("policies", "new", "queues", "Small_First", "--dir", str(tmp_path / "missing"))
    assert done.code == 2
    assert "GROUP must be one of queue, placement, allocator, predictor, contention, not 'queues'" in done.err
    assert "NAME must be at most 30 lowercase letters" in done.err
    assert "DIR " in done.err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fifo", "is installed already, by cotenant"),
        ("cotenant", "is the name of an installed package"),
        ("class", "is a name of Python itself"),
        ("json", "is a name of Python itself"),
        ("tests", "is the name of the folder of its tests"),
        ("here", "has 'here' already"),
    ],
)
def test_a_name_that_is_taken_is_refused(shell: Shell, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "here").mkdir()
    done = shell("policies", "new", "queue", name, "--dir", str(tmp_path))
    assert done.code == 2
    assert why in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
