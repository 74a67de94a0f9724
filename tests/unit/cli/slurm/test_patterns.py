"""File names of outputs: the nodes' shell and the client give the same names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.cli.slurm import patterns
from cotenant.core.model.job_number import ID_DIGITS, encode, number_of

COMMON = Path(patterns.__file__).with_name("common.sh").read_text()
VALUES = {
    "A": "12", "a": "7", "j": "12000007", "J": "12000007", "N": "gpu1", "n": "0", "s": "batch", "t": "3",
    "u": "eve", "x": "my job",
}  # fmt: skip
VARIABLES = {
    "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "7", "SLURM_JOB_ID": "12000007", "SLURMD_NODENAME": "gpu1",
    "SLURM_NODEID": "0", "SLURM_PROCID": "3", "SLURM_JOB_USER": "eve", "SLURM_JOB_NAME": "my job",
}  # fmt: skip


def in_shell(code: str, *lines: str) -> list[str]:
    """Return what a shell that knows common.sh prints for each of some lines."""
    program = f'{COMMON}\nfor line in "$@"; do {code}; done'
    done = subprocess.run(
        ["sh", "-c", program, "sh", *lines], env={"PATH": "/usr/bin:/bin", **VARIABLES}, capture_output=True, check=True
    )
    return done.stdout.decode().split("\0")[:-1]


PATTERN = st.lists(
    st.sampled_from(
        [*(f"%{letter}" for letter in VALUES), "%4a", "%03t", "%2j", "%12A", "%%", "%z", "%5z", "/", "a b", "-", "%"]
    ),
    max_size=6,
).map("".join)


@settings(max_examples=5)
@given(st.lists(PATTERN, min_size=30, max_size=60))
def test_the_nodes_and_the_client_give_the_same_names(texts: list[str]) -> None:
    assert in_shell(r'expand "$line"; printf "%s\0" "$file"', *texts) == [patterns.expand(one, VALUES) for one in texts]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("slurm-%j.out", "slurm-12000007.out"), ("%x_%4a", "my job_0007"), ("%u/%N", "eve/gpu1"), ("100%%", "100%")],
)
def test_patterns_name_files(pattern: str, name: str) -> None:
    assert patterns.expand(pattern, VALUES) == name


@settings(max_examples=5)
@given(st.lists(st.integers(0, 2**60 - 1).map(lambda number: encode(number, ID_DIGITS)), min_size=20, max_size=40))
def test_the_nodes_and_the_client_give_a_job_the_same_number(job_ids: list[str]) -> None:
    numbers = in_shell(r'number "$line"; printf "%s\0" "$number"', *job_ids)
    assert [int(number) for number in numbers] == [number_of(job_id) for job_id in job_ids]
