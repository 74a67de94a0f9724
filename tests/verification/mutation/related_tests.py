"""Which tests are asked about a module: those that import it, and by the layout of the tree those named after it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.support.durations import Durations

PACKAGE = "cotenant"
LINKED = ("services", "policies", "node_agent")  # folders beside `src`, which are packages of ours by symbolic links
TESTS = ("tests/unit", "tests/contract")
CONTRACTS = "tests/contract"
POLICIES = f"{PACKAGE}.policies"
TESTS_IN_A_FILE = 5  # of a short file, whose duration is not recorded
FARTHER_CPU_SECONDS = 30.0


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
    """The test files for a module, the nearest first; of `contracts` only the cases of these policies.

    Those `farther` away are asked about what the others do not find.
    """

    files: tuple[str, ...]
    farther: tuple[str, ...] = ()
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

        These are its own examples, the file named after it, and those that import it, in the order of their durations;
        `farther` are those that import a module which imports it, the quickest, or all if no test imports the module. A
        policy also has its cases of the contract.
        """
        path = self.modules[module]
        named = f"tests/unit/{path.removeprefix(f'src/{PACKAGE}/')}"
        named = str(Path(named).with_name(f"test_{Path(path).name}"))
        near, farther = self._importing_tests(module)
        if (self.root / named).is_file():
            near.add(named)
        contracts, policies = self._contracts(module)
        nearest = sorted(near, key=lambda one: (one != named, self._cpu_seconds(one), one))
        quickest, left_seconds = list[str](), FARTHER_CPU_SECONDS
        for one in sorted(farther - near, key=lambda one: (self._cpu_seconds(one), one)):
            if (left_seconds := left_seconds - self._cpu_seconds(one)) >= 0:
                quickest.append(one)
        extra = tuple(one for one in contracts if one not in near)
        return Related((imported_from(path), *nearest), tuple(quickest), extra, policies)

    def cpu_seconds(self, files: Iterable[str]) -> float:
        """Return how much CPU time the tests in some files are expected to take."""
        return sum(map(self._cpu_seconds, files))

    def _cpu_seconds(self, file: str) -> float:
        return self._durations.of(file, TESTS_IN_A_FILE).cpu_seconds

    def _importing_tests(self, module: str) -> tuple[set[str], set[str]]:
        """Return the tests that import a module, or else what imports it, and those one step farther away."""
        found, nearest, seen = set[str](), {module}, {module}
        while nearest and not found:
            found = {test for one in nearest for test in self._tests[one]}
            nearest = {importer for one in nearest for importer in self._importers[one]} - seen
            seen |= nearest
        return found, {test for one in nearest for test in self._tests[one]}

    def _contracts(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the files of the contract and the policies that a module is part of."""
        package = module if module.count(".") == POLICIES.count(".") + 1 else module.rpartition(".")[0]
        names = [name for one, some in self._policies.items() if f"{one}.".startswith(f"{package}.") for name in some]
        if not module.startswith(POLICIES) or not names:
            return (), ()
        files = (path.relative_to(self.root).as_posix() for path in (self.root / CONTRACTS).glob("test_*.py"))
        asked = (name for name in files if "plugins.discover(" in (self.root / name).read_text())
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
