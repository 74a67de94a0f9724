"""Runs notebooks: `python -m tools.notebooks docs/notebooks/*.ipynb` executes their cells and writes what they show.

Each runs in a Python of its own, in an empty folder, against the mesh that COTENANT_STATE_DIR names. It needs no
Jupyter: a cell is compiled with `await` allowed at its top, and its last expression is shown by its `_repr_png_`,
`_repr_html_` and `repr`, as IPython does. `--check` writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import base64
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

RICH = (("image/png", "_repr_png_"), ("text/html", "_repr_html_"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def written(text: str) -> list[str]:
    """Return a text as notebooks keep it: a list of lines."""
    return text.splitlines(keepends=True)


def shown(value: object) -> dict[str, Any]:
    """Return what a notebook shows of a value, by media type."""
    data: dict[str, Any] = {"text/plain": written(repr(value))}
    for media, method in RICH:
        if (rich := getattr(value, method, None)) and (made := rich()):
            data[media] = base64.b64encode(made).decode() if isinstance(made, bytes) else written(made)
    return data


def outputs_of(source: str, name: str, variables: dict[str, Any], loop: asyncio.AbstractEventLoop) -> list[Any]:
    """Run a cell and return its outputs. Whatever it raises is raised."""
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    tree.body = tree.body[:-1] if last else tree.body
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        for part in (tree, ast.Expression(last.value) if last else None):
            if part is not None:
                mode = "eval" if isinstance(part, ast.Expression) else "exec"
                code = compile(part, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                value = eval(code, variables)
                if code.co_flags & inspect.CO_COROUTINE:
                    value = loop.run_until_complete(value)
    outputs: list[Any] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": written(printed.getvalue())})
    if last and value is not None:
        outputs.append({"output_type": "execute_result", "metadata": {}, "data": shown(value)})
    return outputs


def execute(notebook: dict[str, Any]) -> None:
    """Run all cells of a notebook in this process and keep their outputs in it; exit with 1 at the first error."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main  # functions of the cells are pickled as those of a program
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for number, cell in enumerate(code_cells(notebook), 1):
        try:
            cell["outputs"] = outputs_of("".join(cell["source"]), f"cell {number}", vars(main), loop)
        except Exception:
            sys.exit(f"cell {number}:\n{''.join(cell['source'])}\n\n{traceback.format_exc()}")
        cell["execution_count"] = number
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
    notebook["metadata"] = METADATA


def code_cells(notebook: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the cells with code."""
    return (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def main(words: Sequence[str]) -> int:
    """Run notebooks and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="run the cells, but do not keep what they show")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.here:
        notebook = json.loads(sys.stdin.read())
        execute(notebook)
        print(json.dumps(notebook, indent=1, ensure_ascii=False))
        return 0
    for path in given.notebooks:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, __file__, "--here", str(path)],
                cwd=folder,
                env={**os.environ, "COLUMNS": "100"},
                input=path.read_text(),
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            print(f"{path}: {done.stderr}", file=sys.stderr)
            return 1
        if not given.check:
            path.write_text(done.stdout)
        print(f"   ran {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
