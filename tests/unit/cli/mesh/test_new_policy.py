"""`cotenant policies new` and `bench`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell

from cotenant.cli.mesh.new_policy import KINDS, package
from cotenant.cli.mesh.policy_bench import BASELINES
from cotenant.plugins import POLICY_GROUPS, SHORT_GROUPS


def test_every_group_has_a_template_and_a_baseline() -> None:
    assert set(KINDS) == set(SHORT_GROUPS)
    assert set(BASELINES) == set(POLICY_GROUPS)


def test_a_runtimes_package_needs_an_agent_and_times_no_decisions() -> None:
    files = package("runtime", "gentle")
    assert 'test = ["cotenant[agent,conformance]"]' in files["pyproject.toml"]
    assert '[project.entry-points."cotenant.runtimes"]\ngentle = "gentle.policy:Gentle"' in files["pyproject.toml"]
    assert 'runtime = "gentle"' in files["README.md"]
    assert "bench" not in files["README.md"]


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
    assert "GROUP must be one of queue, placement, allocator, predictor, contention, runtime, not 'queues'" in done.err
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


@pytest.mark.parametrize(("group", "name"), [("queue", "las"), ("placement", "consolidate"), ("contention", "none")])
def test_a_policy_is_timed_beside_its_baseline_at_three_sizes(shell: Shell, group: str, name: str) -> None:
    done = shell("policies", "bench", name, "--jobs", "40", "--nodes", "8", "--json")
    assert done.code == 0, done.err
    assert [(one["jobs"], one["nodes"]) for one in done.json] == [(10, 2), (20, 4), (40, 8)]
    for one in done.json:
        assert one["group"] == POLICY_GROUPS[group]
        assert one["baseline"] == BASELINES[group]
        assert one["ratio"] == one["seconds"] / one["baseline_seconds"] > 0


def test_what_cannot_be_timed_is_named(shell: Shell) -> None:
    assert "no policy 'lass' is installed; did you mean las?" in shell("policies", "bench", "lass").err
    done = shell("policies", "bench", "las", "--jobs", "3", "--nodes", "0")
    assert (done.code, "--jobs must be 4 or more, not 3" in done.err, "--nodes must be" in done.err) == (2, True, True)
