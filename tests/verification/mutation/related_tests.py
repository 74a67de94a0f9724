"""Which tests are asked about a module: those that import it, and by the layout of the tree those named after it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.durations import Durations

PACKAGE = "cotenant"
LINKED = ("services", "policies", "node_agent")  # folders beside `src`, which are packages of ours by symbolic links
CONTRACTS = ("tests/contract", "src/cotenant/conformance")
TESTS = ("tests/unit", *CONTRACTS)
POLICIES = f"{PACKAGE}.policies"
PURE = (f"{PACKAGE}.core", POLICIES)
PURE_TESTS = ("tests/unit/core/", "tests/unit/policies/", "tests/unit/simulator/", *CONTRACTS)
TESTS_IN_A_FILE = 5  # of a short file, whose duration is not recorded


def module_at(path: str) -> str:
    """Return the name of the module in a file, given from the root of the repository.

    >>> module_at("policies/las.py"), module_at("src/cotenant/core/model/job.py")
    ('cotenant.policies.las', 'cotenant.core.model.job')
    """
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else (PACKAGE, *parts))


def imported_from(path: str) -> str:
    """Return the path from which a module is imported, through the symbolic links in `src`.

    >>> imported_from("policies/las.py"), imported_from("src/cotenant/core/model/job.py")
    ('src/cotenant/policies/las.py', 'src/cotenant/core/model/job.py')
    """
    return path if path.startswith("src/") else f"src/{PACKAGE}/{path}"


@dataclass(frozen=True, slots=True)
class Related:
    """The test files for a module, the nearest first; of `contracts` only the cases of these policies."""

    files: tuple[str, ...]
    cpu_seconds: float
    contracts: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()


class Repository:
    """The modules and the tests of a checkout, and which imports which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._durations = Durations.read(root / "tests/support/durations.json")

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """The files of all modules, by module; generated ones are left out."""
        folders = [self.root / name for name in LINKED] + [self.root / "src" / PACKAGE]
        paths = (path for folder in folders for path in sorted(folder.rglob("*.py")))
        names = (path.relative_to(self.root).as_posix() for path in paths if not path.name.endswith("_pb2.py"))
        own = (name for name in names if not name.startswith(tuple(f"src/{PACKAGE}/{one}/" for one in LINKED)))
        return {module_at(name): name for name in own if not name.endswith(("_pb2_grpc.py", "__init__.py"))}

    @cached_property
    def _importers(self) -> Mapping[str, set[str]]:
        """The modules that import each module."""
        importers: dict[str, set[str]] = {module: set() for module in self.modules}
        for module, path in self.modules.items():
            for imported in self._imports(path) & importers.keys():
                importers[imported].add(module)
        return importers

    @cached_property
    def _tests(self) -> Mapping[str, set[str]]:
        """The test files that import each module."""
        tests: dict[str, set[str]] = {module: set() for module in self.modules}
        for folder in TESTS:
            for path in sorted((self.root / folder).rglob("test_*.py")):
                name = path.relative_to(self.root).as_posix()
                for imported in self._imports(name) & tests.keys():
                    if name.startswith(PURE_TESTS) or not imported.startswith(PURE):
                        tests[imported].add(name)
        return tests

    def _imports(self, path: str) -> set[str]:
        return set(_imported(ast.parse((self.root / path).read_text())))

    @cached_property
    def _policies(self) -> Mapping[str, list[str]]:
        """The names of policies, by the module of each."""
        groups = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["entry-points"]
        named: dict[str, list[str]] = {}
        for group in groups.values():
            for name, target in group.items():
                named.setdefault(target.partition(":")[0], []).append(name)
        return named

    def related(self, module: str) -> Related:
        """Return the tests of a module.

        These are its own examples, the file named after it, those that import it, and those of its package, in the
        order of their durations. If no test imports it, those count that import a module which does. For core and
        policies they are without processes, sockets and clocks, since such tests may fail on a busy machine. A policy
        also has its cases of the contract.
        """
        path = self.modules[module]
        named = f"tests/unit/{path.removeprefix(f'src/{PACKAGE}/')}"
        named = str(Path(named).with_name(f"test_{Path(path).name}"))
        found = self._importing_tests(module)
        if (self.root / named).is_file():
            found.add(named)
        if module.rpartition(".")[0] not in PURE:  # folders of modules that have nothing in common
            package = (self.root / named).parent.glob("test_*.py")
            found.update(path.relative_to(self.root).as_posix() for path in package)
        contracts, policies = self._contracts(module)
        durations = {one: self._durations.of(one, TESTS_IN_A_FILE) for one in {*found, *contracts}}
        nearest = sorted(found, key=lambda one: (one != named, durations[one].cpu_seconds, one))
        extra = tuple(one for one in contracts if one not in found)
        seconds = sum(duration.cpu_seconds for duration in durations.values())
        return Related((imported_from(path), *nearest), seconds, extra, policies)

    def _importing_tests(self, module: str) -> set[str]:
        found, nearest, seen = set[str](), {module}, {module}
        while nearest and not found:
            found = {test for one in nearest for test in self._tests[one]}
            nearest = {importer for one in nearest for importer in self._importers[one]} - seen
            seen |= nearest
        return found

    def _contracts(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the files of the contract and the policies that a module is part of."""
        package = module if module.count(".") == POLICIES.count(".") + 1 else module.rpartition(".")[0]
        names = [name for one, some in self._policies.items() if f"{one}.".startswith(f"{package}.") for name in some]
        if not module.startswith(POLICIES) or not names:
            return (), ()
        paths = (path for folder in CONTRACTS for path in (self.root / folder).glob("test_*.py"))
        files = (path.relative_to(self.root).as_posix() for path in paths)
        asked = (name for name in files if "plugin: plugins.Plugin" in (self.root / name).read_text())
        return tuple(sorted(asked)), tuple(sorted(names))


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield what may be names of modules that a file imports."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.Import():
                yield from (alias.name for alias in node.names)
