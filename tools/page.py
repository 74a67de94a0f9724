"""A page of docs/ that is a session at a terminal."""

from __future__ import annotations

import sys

LINES_MAX = 16  # of one command's output


class Page:
    """What was done and what came of it, as it will be read."""

    def __init__(self, head: str) -> None:
        self.parts = [head]
        self.names: list[tuple[str, str]] = []  # what this machine says, and what the page says

    def name(self, said: object, named: str) -> None:
        """Give something of this machine the name that it has on the page."""
        self.names.append((str(said), named))

    def add_text(self, text: str) -> None:
        """Write prose."""
        self.parts.append(self._named(text))
        print(f"   {text.strip().splitlines()[0][:110]}", file=sys.stderr)

    def show(self, command: str, output: str) -> None:
        """Write a command, and what it printed."""
        lines = [line.rstrip() for line in self._named(output).splitlines() if line.strip()]
        if len(lines) > LINES_MAX:
            lines = [*lines[: LINES_MAX - 2], f"… {len(lines) - LINES_MAX + 1} more", lines[-1]]
        shown = "\n".join([f"$ {self._named(command)}", *lines])
        self.parts.append(f"```console\n{shown}\n```")

    def _named(self, text: str) -> str:
        for said, named in sorted(self.names, key=lambda pair: -len(pair[0])):
            text = text.replace(said, named)
        return text

    def render(self) -> str:
        """The whole page."""
        return "\n\n".join(part.strip("\n") for part in self.parts) + "\n"
