"""The shipped rules, each by its example; invalid rules files; patterns that could take forever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

import cotenant.core.failures
from cotenant.core.failures.classifier import EVIDENCE_LENGTH_MAX, LINE_LENGTH_MAX, AttemptEnd, classify
from cotenant.core.failures.rules import BadRules, Responsibility, Rule, merged, parse_rules, safe_pattern

FILE = Path(cotenant.core.failures.__file__).with_name("rules.toml")
RULES = parse_rules(FILE.read_text(), "rules.toml")
OF_PHILLY = {  # Jeon et al., ATC 2019, table 7; "no signature" is what no rule speaks of
    *("cpu_out_of_memory", "incorrect_inputs", "semantic_error", "core_dump", "invalid_memory_access"),
    *("model_checkpoint_error", "cuda_failure", "syntax_error", "traceback_from_crash", "mpi_error"),
    *("gpu_out_of_memory", "mpi_runtime_failure", "permission_error", "import_error", "job_preempted"),
    *("cuda_init_failed", "model_diverged", "cuda_version_mismatch", "gpu_ecc_error"),
}
HEAD = 'version = 1\n\n[[rule]]\nname = "x"\nclass = "y"\nblame = "user"\n'


def named(rule: Rule) -> str:
    return rule.name


def test_there_are_many_and_they_cover_phillys_classes() -> None:
    assert len(RULES) >= 80
    assert {rule.failure_class for rule in RULES} >= OF_PHILLY


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.line or rule.sign], ids=named)
def test_its_example_is_told_by_it_and_by_none_before_it(rule: Rule) -> None:
    assert rule.example, "an example is missing"
    end = (
        AttemptEnd(exit_code=1, signs=[rule.example])
        if rule.sign
        else AttemptEnd(exit_code=1, tail=f"epoch 3\n{rule.example}\n")
    )
    failure = classify(end, RULES)
    assert failure.rule == rule.name
    assert failure.evidence == rule.example[:EVIDENCE_LENGTH_MAX]
    assert (failure.failure_class, failure.blame) == (rule.failure_class, rule.blame)


@pytest.mark.parametrize(
    ("end", "rule"),
    [
        (AttemptEnd(signal=9, out_of_memory=True), "oom-killed"),
        (AttemptEnd(signal=9), "signal-kill"),
        (AttemptEnd(signal=11), "signal-segv"),
        (AttemptEnd(signal=6), "signal-abort"),
        (AttemptEnd(signal=15), "signal-term"),
        (AttemptEnd(signal=2), "signal-int"),
        (AttemptEnd(exit_code=127), "no-such-command"),
        (AttemptEnd(exit_code=126), "not-executable"),
        (
            AttemptEnd(exit_code=1, signs=["xid 79 on GPU-1"], tail="RuntimeError: CUDA error: out of memory"),
            "xid-gpu-lost",
        ),
        (AttemptEnd(exit_code=1, signs=["gpu lost on GPU-1"]), "xid-gpu-lost"),
        (AttemptEnd(exit_code=1, signs=["xid 62 on GPU-1"]), "xid-gsp"),
        (
            AttemptEnd(exit_code=1, signs=["disk low: 12 MiB"], tail="ModuleNotFoundError: No module 'x'"),
            "module-missing",
        ),
        (AttemptEnd(message="gpu_busy: GPU-1 is held by pid 7 (x of y), not started by us"), "gpu-busy"),
        (
            AttemptEnd(signal=15, message="stopped for its node's health: was on n1: a load of 900 on 2 CPUs"),
            "node-unwell",
        ),
        (AttemptEnd(exit_code=1, message="rank 0: cannot be started: No such file or directory"), "file-missing"),
    ],
)
def test_an_end_without_words_is_told_by_how_it_came(end: AttemptEnd, rule: str) -> None:
    assert classify(end, RULES).rule == rule


@pytest.mark.parametrize(
    "end", [AttemptEnd(exit_code=3), AttemptEnd(exit_code=1, tail="epoch 3\ngiving up\n"), AttemptEnd()]
)
def test_what_no_rule_speaks_of_is_nobodys_fault_and_shows_its_last_line(end: AttemptEnd) -> None:
    failure = classify(end, RULES)
    assert (failure.failure_class, failure.blame, failure.rule) == ("unclassified", Responsibility.UNKNOWN, "")
    assert failure.evidence == ("giving up" if end.tail else "")
    assert not failure.transient


def test_a_users_failure_is_never_called_transient_or_the_nodes() -> None:
    assert not [
        rule.name for rule in RULES if rule.blame is Responsibility.USER and (rule.transient or rule.node_at_fault)
    ]


def test_the_exception_decides_not_the_traceback_above_it() -> None:
    tail = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    import torhc\n'
    failure = classify(AttemptEnd(exit_code=1, tail=f"{tail}ModuleNotFoundError: No module named 'torhc'\n"), RULES)
    assert (failure.failure_class, failure.evidence) == ("import_error", "ModuleNotFoundError: No module named 'torhc'")


EVIL = [
    text * (4096 // len(text)) for text in ("a", " ", "thread '", "DataLoader worker (pid 1", "0", "loss is ", "a\n")
]


@pytest.mark.parametrize("tail", EVIL, ids=lambda text: repr(text[:8]))
def test_no_output_takes_long(tail: str) -> None:
    begin = time.process_time()
    classify(AttemptEnd(exit_code=1, tail=tail), RULES)
    assert time.process_time() - begin < 0.25


def test_the_slowest_pattern_that_is_taken_is_quick_on_the_worst_line() -> None:
    slow = Rule("slow", "x", Responsibility.USER, safe_pattern(r"a.*b"))
    begin = time.process_time()
    classify(AttemptEnd(exit_code=1, tail="\n".join(["a" * LINE_LENGTH_MAX] * 8)), [slow])
    assert time.process_time() - begin < 0.25


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|aa)+b", "(a?a)+b", "((a*)*)*b", "a.*b.*c", "(a|b|ab)*c", "(.*.*.*)*x"]
)
def test_no_pattern_takes_longer_on_a_worse_line(pattern: str) -> None:
    rule = Rule("slow", "x", Responsibility.USER, safe_pattern(pattern))
    begin = time.process_time()
    classify(AttemptEnd(exit_code=1, tail="\n".join([f"{n}{'a' * LINE_LENGTH_MAX}" for n in range(8)])), [rule])
    assert time.process_time() - begin < 0.1


@pytest.mark.parametrize(
    "pattern", [r"(a)\1+", "a(?!b)", "(?<=a)b", "(?>a)", "((a{2,20}){3,9}){9,99}", "(", "", "x" * 401, "a*"]
)
def test_a_pattern_that_cannot_be_linear_or_says_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        safe_pattern(pattern)


@settings(max_examples=examples(100))
@given(st.text(max_size=2000), st.integers(0, 255), st.integers(0, 64), st.lists(st.text(max_size=40), max_size=4))
def test_anything_at_all_is_classified(tail: str, code: int, signal: int, signs: list[str]) -> None:
    failure = classify(AttemptEnd(code, signal, False, "", tail, signs), RULES)
    assert failure.failure_class
    assert len(failure.evidence) <= EVIDENCE_LENGTH_MAX


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version = 1\n[[rule", "ours.toml is not valid TOML: "),
        ("version = 2", "ours.toml: version: must be 1, not 2"),
        ("version = 1\nrules = []", "ours.toml: rules: no such key"),
        ("version = 1\nrule = 3", "ours.toml: rule: must be written as [[rule]]"),
        (HEAD, "ours.toml:4: name: the rule 'x' has no condition"),
        (HEAD + "lin = 'a'", "ours.toml:7: lin: no such field; did you mean line?"),
        (
            HEAD + "line = 'a(?=b)'",
            "ours.toml:7: line: is not a regular expression: '(?=' is not supported; patterns have",
        ),
        (HEAD + "line = '('", "ours.toml:7: line: is not a regular expression"),
        (HEAD + "line = 3", "ours.toml:7: line: must be a string, not 3"),
        (HEAD + "signals = ['SIGKILL']", "ours.toml:7: signals: must be a list of whole numbers"),
        (HEAD + "signals = [9, 'SIGKILL']", "ours.toml:7: signals: must be a list of whole numbers"),
        (HEAD + "exit_codes = [1, true]", "ours.toml:7: exit_codes: must be a list of whole numbers"),
        (HEAD + "line = 'a'\ntransient = true", "ours.toml:8: transient: a user's own failure recurs"),
        (HEAD.replace('"user"', '"me"') + "line = 'a'", "ours.toml:6: blame: must be one of"),
        (HEAD.replace('"y"', '"Y y"') + "line = 'a'", "ours.toml:5: class: must be of a-z"),
        (HEAD.replace('blame = "user"', "") + "line = 'a'", "ours.toml:3: blame: is missing"),
        (HEAD + "line = 'a'\n" + HEAD[12:] + "line = 'b'", "ours.toml:9: name: 'x' is already defined"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_file_line_and_field(text: str, told: str) -> None:
    with pytest.raises(BadRules) as caught:
        parse_rules(text, "ours.toml")
    assert str(caught.value).startswith(told)


def test_an_operators_rules_come_first_and_replace_those_of_the_same_name() -> None:
    own = parse_rules(
        HEAD.replace('"x"', '"python-value"').replace('"user"', '"infrastructure"') + "line = 'ValueError: no licence'",
        "ours.toml",
    )
    rules = merged(own, RULES)
    assert len(rules) == len(RULES)
    assert classify(AttemptEnd(exit_code=1, tail="ValueError: no licence"), rules).failure_class == "y"
    assert classify(AttemptEnd(exit_code=1, tail="ValueError: 3"), rules).failure_class == "unclassified"
