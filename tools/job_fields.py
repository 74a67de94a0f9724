"""Generates docs/job-fields.md from the table of job fields: `make docs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cotenant.core.model.job_fields import JOB, REQUEST, ROLE, STRUCTURED, JobField

PAGE = Path(__file__).resolve().parent.parent / "docs" / "job-fields.md"

TEXT = """\
# The fields of a job

What a [job file](tutorials/submitting.md) may contain. `cotenant submit --example` prints a file with every field; a
flag of `cotenant submit` sets the field in every job of its files. A name with a point stands inside another field:
`qos.latency` is `latency` inside `qos`. A field marked with ✱ can be changed later by `cotenant update`.

## Of the job

{job}

## Of a role

Beside the fields of the job if it has a single role; otherwise in each entry of `roles`, with `name` for `role` and
with a `command` of its own if it needs one.

{role}
"""


def page() -> str:
    """Return the page."""
    return TEXT.format(job=_table((*JOB, *STRUCTURED)), role=_table((*ROLE, *REQUEST)))


def _table(fields: Iterable[JobField]) -> str:
    rows = ["| field | flag | what it holds | meaning |", "|---|---|---|---|"]
    for field in fields:
        flag = f"`--{field.flag}`" if field.metavar or field.switch else ""
        limit = f"; must {field.limit.text}" if field.limit else ""
        mark, meaning = " ✱" if field.update else "", field.help.replace("|", "\\|")
        rows.append(f"| `{field.key}`{mark} | {flag} | {field.type}{limit} | {meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
