"""Options of `sbatch`: on the command line, in directives and in the environment."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.cli.slurm.options import (
    OPTIONS,
    UnknownOption,
    merged,
    read_arguments,
    read_directives,
    read_environment,
)
from cotenant.cli.slurm.outcome import SlurmError


@pytest.mark.parametrize(
    ("words", "given_", "rest"),
    [
        (["-N2", "-n", "4", "job.sh", "-x"], {"nodes": "2", "ntasks": "4"}, ["job.sh", "-x"]),
        (["--mem=2G", "--time", "5", "--", "-c"], {"mem": "2G", "time": "5"}, ["-c"]),
        (["-Hv", "--no-requeue"], {"hold": "", "verbose": "", "no-requeue": ""}, []),
        (["--exclusive", "--exclusive=user", "a"], {"exclusive": "user"}, ["a"]),
        (["--job-n=x", "--wrap", "a b"], {"job-name": "x", "wrap": "a b"}, []),
        (["-"], {}, ["-"]),
    ],
)
def test_a_command_line_is_read_up_to_the_script(words: list[str], given_: dict[str, str], rest: list[str]) -> None:
    assert read_arguments("sbatch", words) == (given_, rest)


@pytest.mark.parametrize("words", [["--foo"], ["--mem"], ["-1"], ["-n"], ["--hold=yes"], ["--n=1"]])
def test_other_options_are_refused_as_slurm_does(words: list[str]) -> None:
    with pytest.raises(UnknownOption) as refused:
        read_arguments("sbatch", words)
    assert refused.value.lines[0].startswith("sbatch: ")
    assert refused.value.lines[1] == 'Try "sbatch --help" for more information'


def test_directives_end_at_the_first_command() -> None:
    script = (
        "#!/bin/sh\n# a comment\n\n#SBATCH -n 2\n#SBATCHED -n 9\n##SBATCH -n 8\n#SBATCH -o 'a b'\ncd x\n#SBATCH -n 3\n"
    )
    assert read_directives(script) == ({"ntasks": "2", "output": "a b"}, [])


def test_unknown_directives_are_named() -> None:
    assert read_directives("#!/bin/sh\n#SBATCH --fast --mem=1G words\n") == ({"mem": "1G"}, ["--fast", "words"])


@pytest.mark.parametrize("line", ["#SBATCH -J 'open", "#SBATCH --mem"])
def test_a_directive_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(SlurmError):
        read_directives(f"#!/bin/sh\n{line}\n")


def test_the_command_line_wins_over_the_environment_and_that_over_the_script() -> None:
    directives, _ = read_directives("#!/bin/sh\n#SBATCH --time=1 --mem=1G --requeue -J a\n")
    environment = read_environment({"SBATCH_TIMELIMIT": "2", "SBATCH_MEM_PER_CPU": "2G", "SBATCH_WRAP": "x", "A": "b"})
    command_line, _ = read_arguments("sbatch", ["-t3", "--no-requeue"])
    assert merged(directives, environment, command_line) == {
        "time": "3",
        "mem-per-cpu": "2G",
        "no-requeue": "",
        "job-name": "a",
    }


def test_no_short_option_stands_for_two() -> None:
    letters = [option.short for option in OPTIONS.values() if option.short]
    assert len(letters) == len(set(letters))


WITH_VALUE = st.sampled_from([name for name, option in OPTIONS.items() if option.takes == "value"])


@given(st.lists(st.tuples(WITH_VALUE, st.text("ab 1,:=%'\"#-", max_size=8)), max_size=6))
def test_both_ways_of_giving_a_value_are_the_same(pairs: list[tuple[str, str]]) -> None:
    joined = [f"--{name}={value}" for name, value in pairs]
    apart = [word for name, value in pairs for word in (f"--{name}", value)]
    assert read_arguments("sbatch", joined) == read_arguments("sbatch", apart) == (dict(pairs), [])


@given(st.text(max_size=200))
def test_any_script_is_read_or_refused(text: str) -> None:
    with suppress(SlurmError):
        read_directives(f"#!/bin/sh\n#SBATCH {text}")
