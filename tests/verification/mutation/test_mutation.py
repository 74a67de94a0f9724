"""Which tests are related to a module, the verdicts on a few mutants of a real one, and what the command reports."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from itertools import cycle
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.verification.mutation import __main__ as command
from tests.verification.mutation import runner
from tests.verification.mutation.code_mutants import Mutant
from tests.verification.mutation.related_tests import Repository
from tests.verification.mutation.runner import Result, Verdict, failing_without_mutants, judge_all

REPOSITORY = Repository(ROOT)


@pytest.mark.deep
def test_related_tests_import_the_module_or_are_named_after_it_and_that_one_is_first() -> None:
    ledger = REPOSITORY.related("cotenant.core.capacity.ledger")
    assert ledger.files[:2] == ("src/cotenant/core/capacity/ledger.py", "tests/unit/core/capacity/test_ledger.py")
    assert "tests/unit/core/scheduling/test_cycle.py" in ledger.files
    assert ledger.contracts == ()


@pytest.mark.deep
def test_a_module_that_no_test_imports_has_the_tests_of_those_that_import_it() -> None:
    files = REPOSITORY.related("cotenant.core.scheduling.limits_enforcement").files
    assert "tests/unit/core/scheduling/test_fair_share.py" in files
    assert "tests/unit/core/scheduling/test_preemption.py" in files, "its package has this one too"


@pytest.mark.deep
def test_a_policy_has_its_cases_of_the_contract() -> None:
    las, search = (REPOSITORY.related(f"cotenant.policies.{name}") for name in ("las", "qos.search"))
    assert las.files[0] == "src/cotenant/policies/las.py"
    assert (las.policies, search.policies) == (("las",), ("qos",))
    assert {"tests/contract/test_policies.py", "src/cotenant/conformance/test_queue_orders.py"} <= set(las.contracts)


@pytest.mark.deep
def test_every_module_of_core_and_policies_has_tests() -> None:
    inner = [module for module in REPOSITORY.modules if module.startswith(("cotenant.core", "cotenant.policies"))]
    assert len(inner) > 100
    related = {module: REPOSITORY.related(module) for module in inner}
    assert [module for module, one in related.items() if len(one.files) == 1 and not one.contracts] == []


MODULE = "policies/edf.py"


def replaced(old: str, new: str) -> Mutant:
    """Return a mutant made by hand."""
    source = (ROOT / MODULE).read_text()
    start = len(source[: source.index(old)].encode())
    return Mutant(MODULE, start, start + len(old.encode()), new, 1)


@pytest.mark.deep
def test_a_mutant_is_killed_by_a_test_or_by_types_or_survives_and_the_file_stays() -> None:
    before = (ROOT / MODULE).read_text()
    wrong = replaced("np.where(timed, 0, 1)", "np.where(timed, 1, 0)")
    typed = replaced('name = "edf"', 'name: int = "edf"')
    same = replaced("np.isfinite(jobs.deadline_seconds)", "~np.isinf(jobs.deadline_seconds)")
    results = {one.mutant: one for one in judge_all(REPOSITORY, [wrong, typed, same], jobs=2) if one}
    assert [results[one].verdict for one in (wrong, typed, same)] == [Verdict.KILLED, Verdict.KILLED, Verdict.SURVIVED]
    assert "edf" in results[wrong].killer
    assert results[typed].killer == runner.TYPES
    assert failing_without_mutants(ROOT, [results[wrong].killer]) == []
    assert (ROOT / MODULE).read_text() == before


@pytest.mark.deep
def test_a_mutant_that_never_ends_is_stopped_by_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CPU_SECONDS_MIN", 5)
    monkeypatch.setattr(runner, "CPU_FACTOR", 0)
    endless = replaced("timed = np.isfinite(jobs.deadline_seconds)", "while True: pass")
    assert [one.verdict for one in judge_all(REPOSITORY, [endless], jobs=1) if one] == [Verdict.TIMEOUT]


def test_a_run_reports_the_share_and_fails_below_the_bar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = cycle([Verdict.KILLED, Verdict.KILLED, Verdict.TIMEOUT, Verdict.SURVIVED])

    def judge_quickly(repository: Repository, mutants: Sequence[Mutant], jobs: int) -> Generator[Result | None]:
        for mutant in mutants:
            yield None
            yield Result(mutant, next(verdicts))

    monkeypatch.setattr(command, "judge_all", judge_quickly)
    file = tmp_path / "result.json"
    arguments = ["--only", "src/cotenant/policies/las.py", "--seed", "3", "--json", str(file)]
    assert command.main([*arguments, "--sample", "20"]) == 1
    assert (
        "10 killed, 0 of them by mypy, 5 timed out, 5 survived: 75% of 20 found (53% to 89%)" in capsys.readouterr().out
    )
    first = json.loads(file.read_text())
    assert (first["tried"], first["survived"], first["share_found"]) == (20, 5, 0.75)
    assert command.main([*arguments, "--sample", "20"]) == 1
    assert json.loads(file.read_text()) == first, "the same seed draws the same mutants"
    assert command.main([*arguments, "--sample", "3"]) == 0
    assert command.main(["--only", "nowhere"]) == 2
    assert "no mutants in nowhere" in capsys.readouterr().err


def test_a_checkout_without_its_generated_files_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.missing_stubs(ROOT) == []
    for name in (
        "protos/cotenant/v1/jobs.proto",
        "protos/cotenant/agent/v1/agent.proto",
        "src/cotenant/v1/jobs_pb2.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main(["--sample", "1"]) == 2
    told = capsys.readouterr().err
    assert "error: 1 generated files are missing, src/cotenant/agent/v1/agent_pb2.py first" in told
    assert "make setup" in told
