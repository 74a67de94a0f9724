"""Dependencies in files and options: cycles, names and order."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.jobs.job_file import BadJobs, read_jobs
from cotenant.cli.jobs.job_writer import write_jobs
from cotenant.cli.jobs.submit_order import order_steps
from cotenant.cli.outcome import ExitCode
from cotenant.codec.specs import spec_from_wire
from cotenant.core.model.dependencies import Condition, Dependency
from cotenant.core.model.job_array import read_array

NOW = 1_700_000_000.0


def wrong(text: str) -> list[str]:
    with pytest.raises(BadJobs) as rejection:
        order_steps(read_jobs(text, "jobs.yaml", NOW))
    return [str(mistake) for mistake in rejection.value.mistakes]


def test_after_takes_a_condition_for_each_job() -> None:
    text = "after: [any:a, 'ok: b', fail:c, started:d, e, other:f]\nafter_ok: fail:g\ncommand: [x]"
    [draft] = read_jobs(text, "jobs.yaml", NOW)
    expected = (
        Dependency("a", Condition.AFTER),
        Dependency("b", Condition.AFTER_OK),
        Dependency("c", Condition.AFTER_FAIL),
        Dependency("d", Condition.AFTER_STARTED),
        Dependency("e", Condition.AFTER),
        Dependency("other:f", Condition.AFTER),
        Dependency("fail:g", Condition.AFTER_OK),
    )
    assert draft.spec.dependencies == expected
    [again] = read_jobs(write_jobs([draft.spec]), "written.yaml", NOW)
    assert set(again.spec.dependencies) == set(expected)


def test_after_is_a_list_or_a_string() -> None:
    text = "after: [a, 'b, c']\nafter-ok: d,e\narray: 0-9%2\ncommand: [x]"
    [draft] = read_jobs(text, "jobs.yaml", NOW)
    assert draft.spec.dependencies == (
        Dependency("a", Condition.AFTER),
        Dependency("b, c", Condition.AFTER),
        Dependency("d", Condition.AFTER_OK),
        Dependency("e", Condition.AFTER_OK),
    )
    assert draft.spec.array == read_array("0-9%2")
    [again] = read_jobs(write_jobs([draft.spec]), "again.yaml", NOW)
    assert again.spec == draft.spec


def test_an_invalid_dependency_is_reported_with_its_position() -> None:
    text = "array: 9-1\nafter: {a: b}\nafter_ok: [a, '', [b]]\ncommand: [x]"
    mistakes = wrong(text)
    assert mistakes[0].startswith("jobs.yaml:1:8: array: has the range 9-1, which is empty")
    assert mistakes[1] == "jobs.yaml:2:8: after: must be a single value, not a map"
    assert [line[:26] for line in mistakes[2:]] == ["jobs.yaml:3:15: after_ok: ", "jobs.yaml:3:19: after_ok: "]


def test_a_dependency_cycle_is_reported_without_calling_the_mesh(
    shell: Shell, standin: Standin, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.yaml"
    jobs = [("a", "c"), ("b", "a"), ("c", "b"), ("d", "a")]
    path.write_text("---\n".join(f"name: {name}\nafter_ok: {other}\ncommand: [x]\n" for name, other in jobs))
    ended = shell("submit", str(path))
    assert ended.code == ExitCode.USAGE
    cycle = f"a ({path}:1:1) → c ({path}:9:1) → b ({path}:5:1) → a"
    assert ended.err.splitlines()[1] == f"  {path}:2:11: after_ok: dependency cycle: {cycle}"
    assert not standin.jobs.asked


def test_a_job_cannot_depend_on_itself_or_on_an_ambiguous_name() -> None:
    assert wrong("name: a\nafter: a\ncommand: [x]") == ["jobs.yaml:2:8: after: depends on itself"]
    one = "name: a\ncommand: [x]\n"
    assert wrong(f"{one}---\n{one}---\nafter: [a]\ncommand: [x]") == [
        "jobs.yaml:7:9: after: 'a' is ambiguous; 2 jobs have that name: jobs.yaml:1:1, jobs.yaml:4:1"
    ]


def test_jobs_of_a_file_are_submitted_in_dependency_order(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    [earlier] = shell("submit", "--name", "earlier", "--", "true").out.split()
    path = tmp_path / "jobs.yaml"
    path.write_text(
        f"name: last\nafter_ok: [middle]\nafter: [{earlier[-5:]}]\ncommand: [x]\n---\n"
        "name: middle\nafter_ok: first\ncommand: [x]\n---\nname: first\ncommand: [x]\n"
    )
    ended = shell("submit", "--request-id", "night", str(path))
    assert ended.code == ExitCode.DONE, ended.err
    last, middle, first = ended.out.split()  # as they stand in the file
    assert [job.spec.name for job in standin.jobs.jobs.values()] == ["earlier", "first", "middle", "last"]
    specs = {job_id: spec_from_wire(job.spec) for job_id, job in standin.jobs.jobs.items()}
    assert specs[middle].dependencies == (Dependency(first, Condition.AFTER_OK),)
    assert set(specs[last].dependencies) == {Dependency(middle), Dependency(earlier, Condition.AFTER)}
    assert not [one for one in standin.jobs.asked if "/" in getattr(one, "request_id", "")]  # which queues refuse


def test_unknown_dependencies_are_all_reported_and_nothing_is_submitted(shell: Shell, standin: Standin) -> None:
    ended = shell("submit", "--after", "nosuch", "--after-ok", "another", "--", "true")
    assert ended.code == ExitCode.USAGE
    assert "  --after: job 'nosuch' not found" in ended.err
    assert "  --after-ok: job 'another' not found" in ended.err
    assert not standin.jobs.jobs


def test_whatif_omits_dependencies_without_an_id(shell: Shell, standin: Standin, tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("name: b\nafter: a\ncommand: [x]\n---\nname: a\ncommand: [x]\n")
    assert [answer["name"] for answer in shell("whatif", str(path), "--json").json] == ["b", "a"]
    assert not standin.jobs.asked[-1].spec.dependencies
    assert "job 'nosuch' not found" in shell("whatif", "--after", "nosuch").err
