"""Generates docs/architecture.md from the code: packages, modules and layers."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
LINKED = ("services", "policies", "node_agent")  # folders of the root that are packages of `cotenant`
GENERATED = ("v1", "agent", "internal", "storage")
TEXT = """# Architecture

Drawn by `make docs` from the code and from the layers that import-linter enforces; a test fails if this page differs.
[Where to change what](where-to-change-what.md) lists the places of common changes; the [glossary](glossary.md) has the
words.

```
 clients ──gRPC──► queue ───Estimate──► predictor ◄──windows── contention ◄─samples─┐
                    │  └──PlanPlacement──► placement ──assignments──► node agent ────┘
                    └────────── store (SQLite embedded │ etcd) ◄──────┘        (one per server)
```

A client talks to the queue. Each scheduling cycle the queue sends the waiting jobs, with estimates from the predictor,
to placement, which decides with the policies of `cotenant.policies`, commits the allocations to the store, and sends
them to the node agents. An agent starts one supervisor per attempt, which outlives the agent, and enforces cores,
memory, GPUs and bandwidth. Agents stream samples to contention, which finds the CPU jobs that slow other jobs down,
throttles or moves them, and passes the measured rates to the predictor. The simulator runs the same `core` and
`policies` under a virtual clock.

## Layers

A package imports only packages below it; packages in the same row do not import each other.

{layers}

## Packages

{packages}
"""


def page() -> str:
    """Return the whole page."""
    return TEXT.format(
        layers="\n\n".join(_layers()),
        packages="\n".join(_packages()),
    )


def _layers() -> Iterator[str]:
    """Yield a list for each layers contract of import-linter."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in settings:
        if contract["type"] != "layers":
            continue
        rows = [" · ".join(f"`{name}`" for name in _names(layer)) for layer in contract["layers"]]
        yield f"**{contract['name']}**, highest first:\n\n" + "\n".join(f"1. {row}" for row in rows)


def _names(layer: str) -> Iterator[str]:
    """Yield the existing packages of a layer; a name in parentheses may not exist."""
    for word in layer.replace(":", "|").split("|"):
        name = word.strip(" ()").removeprefix("cotenant.")
        top = name.partition(".")[0]
        if (ROOT / top).exists() or any((ROOT / "src" / "cotenant").glob(f"{top}*")):
            yield name


def _packages() -> Iterator[str]:
    """Yield a heading for each package and a line for each module: its name and the first line of its docstring."""
    for folder in _folders():
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        if not modules:
            continue
        yield f"### `{_package_name(folder)}`\n"
        if about := _first_line(folder / "__init__.py"):
            yield f"{about}\n"
        for module in modules:
            yield f"- `{module.stem}`: {_first_line(module)}".rstrip(": ")
        yield ""


def _folders() -> Iterator[Path]:
    roots = [*(ROOT / name for name in LINKED), ROOT / "src" / "cotenant"]
    for root in roots:
        for folder in sorted([root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]):
            parts = folder.relative_to(root).parts
            if "__pycache__" not in parts and not {*parts} & {*LINKED, *GENERATED}:
                yield folder


def _package_name(folder: Path) -> str:
    path = folder.relative_to(ROOT)
    parts = path.parts[1:] if path.parts[0] == "src" else ("cotenant", *path.parts)
    return ".".join(parts)


def _first_line(path: Path) -> str:
    if not path.exists():
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
