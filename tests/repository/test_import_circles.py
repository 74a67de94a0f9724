"""No module imports itself by way of others, not even inside a function or for type checking only."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def circle_in(graph: grimp.ImportGraph) -> list[str]:
    """Return the modules of a circle of imports, the first one again at the end; [] if there is none."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_imports_go_in_a_circle() -> None:
    assert circle_in(grimp.build_graph("cotenant", cache_dir=None)) == []


@pytest.mark.parametrize("length", [2, 3])
def test_a_circle_is_found(length: int) -> None:
    graph = grimp.ImportGraph()
    for number in range(length):
        graph.add_import(importer=f"m{number}", imported=f"m{(number + 1) % length}")
    assert set(circle_in(graph)) == {f"m{number}" for number in range(length)}
