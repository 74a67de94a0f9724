"""Generates docs/reasons.md from the tables in cotenant.core: `make docs`."""

from __future__ import annotations

from pathlib import Path

from cotenant.core.model.reason_docs import MEANINGS
from cotenant.core.model.refusal import WAIT_OF, Code

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reasons.md"

TEXT = """\
# Why a job waits

Each waiting job has one reason: a stable code, a sentence with the numbers, and what would change it. `cotenant jobs`
shows the code, `cotenant explain ID` everything, and `--json` the numbers by name. Drawn by `make docs` from the
tables in the code; a test fails if this page differs.

Metrics and simulations aggregate waits by *kind*. A job of a tenant that already holds its fair share waits for
`fair_share`, whatever its code, unless it waits for something outside the cluster or can never run. If [tenants share
fairly](fair-share.md), the sentence says what the tenant holds, with two more numbers: `tenant_share`, the share of the
cluster that the tenant holds (0 to 1), and `tenant_fair_share`, its fair share. If its past use holds it back, there
are also `tenant_usage_share`, its share of the decayed usage of the tenants that it shares with, and
`tenant_fair_usage_share`, its fair share of that.

{codes}"""


def page() -> str:
    """Return the whole page."""
    return TEXT.format(codes="\n".join(section(code) for code in Code)).rstrip() + "\n"


def section(code: Code) -> str:
    """Return the section of one code."""
    meaning = MEANINGS[code]
    numbers = "".join(
        f"- `{name}{'…' if name.endswith('_') else ''}`: {text}\n" for name, text in meaning.numbers.items()
    )
    lines = [
        f"## {code}",
        "",
        f"{meaning.means} Kind: `{WAIT_OF[code]}`.",
        "",
        f"What changes it: {meaning.remedy[0].lower() if meaning.remedy[1].islower() else meaning.remedy[0]}"
        f"{meaning.remedy[1:]}",
        "",
    ]
    return "\n".join([*lines, *(["Numbers:", "", numbers] if numbers else [])])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
