"""A documentation page that records a terminal session."""

from __future__ import annotations

import sys

LINES_MAX = 16  # of one command's output


class Page:
    """A page of prose, commands and their output."""

    def __init__(self, head: str) -> None:
        self.parts = [head]
        self.aliases: list[tuple[str, str]] = []  # actual text, and its alias on the page

    def name(self, actual: object, alias: str) -> None:
        """Replace an actual value, such as an address, by an alias on the page."""
        self.aliases.append((str(actual), alias))

    def add_text(self, text: str) -> None:
        """Add prose."""
        self.parts.append(self._with_aliases(text))
        print(f"   {text.strip().splitlines()[0][:110]}", file=sys.stderr)

    def show(self, command: str, output: str) -> None:
        """Add a command and its output."""
        lines = [line.rstrip() for line in self._with_aliases(output).splitlines() if line.strip()]
        if len(lines) > LINES_MAX:
            lines = [*lines[: LINES_MAX - 2], f"… {len(lines) - LINES_MAX + 1} more", lines[-1]]
        shown = "\n".join([f"$ {self._with_aliases(command)}", *lines])
        self.parts.append(f"```console\n{shown}\n```")

    def _with_aliases(self, text: str) -> str:
        for actual, alias in sorted(self.aliases, key=lambda pair: -len(pair[0])):
            text = text.replace(actual, alias)
        return text

    def render(self) -> str:
        """Return the whole page."""
        return "\n\n".join(part.strip("\n") for part in self.parts) + "\n"
