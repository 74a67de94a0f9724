"""Generates the table of roles in docs/security.md from cotenant.security.permissions: `make docs`."""

from __future__ import annotations

from pathlib import Path

from cotenant.security.permissions import ROLES, SCOPE_LABELS, Role

PAGE = Path(__file__).resolve().parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- roles: drawn by tools/roles.py -->\n", "<!-- roles end -->\n"


def table() -> str:
    """Return one table for each service, in the order of the code."""
    lines: list[str] = []
    service = ""
    for path, rule in ROLES.items():
        _, owner, method = path.split("/")
        if owner != service:
            service = owner
            lines += ["", f"**{service.rpartition('.')[2]}**", "", f"| method | {' | '.join(Role)} | audited |"]
            lines.append("|---" * (len(Role) + 2) + "|")
        cells = [SCOPE_LABELS[rule.scopes[role]] if role in rule.scopes else "" for role in Role]
        lines.append(f"| `{method}` | {' | '.join(cells)} | {'yes' if rule.changes else ''} |")
    return "\n".join([*lines, "", ""]).replace("|  |", "| |").replace("|  |", "| |")


def page(text: str) -> str:
    """Return the text of the page with the table replaced."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
