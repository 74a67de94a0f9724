"""`cotenant policies new`: a package with a policy that works, its tests and its entry point."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.resources import files
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated

from cotenant import plugins
from cotenant.cli.annotations import typer
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.core.spelling import did_you_mean

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
NAME_LENGTH_MAX = 30  # so that lines with it stay within the limit of the package
TEMPLATES = "policy_templates"


@dataclass(frozen=True, slots=True)
class Kind:
    """What the package of a group has in its README, and the extras of Cotenant that its tests need."""

    noun: str
    idea: str
    usage: str
    extras: str = "conformance"


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "queue": Kind(
            "queue policy",
            "jobs that request fewer GPUs come first.",
            "cotenant simulate --trace sample --cluster 2x8 --queue {}",
        ),
        "placement": Kind(
            "placement policy",
            "the node with the fewest free GPUs comes first, then the one with the least free memory.",
            "cotenant simulate --trace sample --cluster 2x8 --placement {}",
        ),
        "allocator": Kind(
            "CPU allocator",
            "each GPU brings a number of cores, at most its share of a node.",
            "cotenant simulate --trace sample --cluster 2x8 --allocator {}",
        ),
        "predictor": Kind(
            "predictor",
            "jobs run as long as similar jobs did on average.",
            "cotenant simulate --trace sample --cluster 2x8 --predictor {}",
        ),
        "contention": Kind(
            "contention policy",
            "where tasks wait for CPUs, the CPU job with the most cores gets fewer.",
            "cotenant up --contention {}",
        ),
        "runtime": Kind(
            "runtime",
            "each program of a job starts under `nice`.",
            'cotenant up --config settings.toml  # with the line: runtime = "{}"',
            "agent,conformance",
        ),
    }
)


def new(
    group: Annotated[str, typer.Argument(metavar="GROUP", help=f"One of {', '.join(KINDS)}.", show_default=False)],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the policy, such as small-first.", show_default=False)
    ],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where to create the folder NAME; default: here.")
    ] = Path(),
) -> None:
    """Create a package with a policy that works, a doctest, tests, a README and its entry point.

    The package is a folder of the policy's name. Change the policy; its README has the commands that install it, run
    its tests and hold it to the laws of its group.

    \b
    Examples:
      cotenant policies new queue small-first
      cotenant policies new placement best-fit --dir ~/src
    """
    folder = directory / name
    if wrong := [*_wrong_with(group, name), *_in_the_way(folder)]:
        raise usage_error("invalid policy", details=wrong)
    try:
        written = [_write(folder / path, text) for path, text in package(group, name).items()]
    except OSError as error:
        raise CommandError(f"cannot write {folder}: {error.strerror or error}") from None
    for path in written:
        print(path)
    print(f"next: cd {folder} && pip install -e '.[test]' && pytest")


def package(group: str, name: str) -> dict[str, str]:
    """Return the files of a new package, by path."""
    module = name.replace("-", "_")
    kind = KINDS[group]
    words = {
        "name": name,
        "module": module,
        "class_name": "".join(word.capitalize() for word in name.split("-")),
        "group": group,
        "entry_group": plugins.SHORT_GROUPS[group],
        "kind": kind.noun,
        "idea": kind.idea,
        "usage": kind.usage.format(name),
        "extras": kind.extras,
        "bench": f"cotenant policies bench {name} --group {group}\n" if group in plugins.POLICY_GROUPS else "",
    }
    sources = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{module}/__init__.py": "init.py",
        f"{module}/policy.py": f"{group}.py",
        f"tests/test_{module}.py": f"{group}_test.py",
    }
    templates = files("cotenant.cli.mesh") / TEMPLATES
    filled = {
        path: Template((templates / f"{source}.txt").read_text(encoding="utf-8")).substitute(words)
        for path, source in sources.items()
    }
    return {**filled, f"{module}/py.typed": ""}


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _wrong_with(group: str, name: str) -> Iterator[str]:
    """Yield why there can be no new policy of that group and name."""
    if group not in KINDS:
        yield f"GROUP must be one of {', '.join(KINDS)}, not {group!r}{did_you_mean(group, KINDS)}"
    module = name.replace("-", "_")
    if not NAME.fullmatch(name) or len(name) > NAME_LENGTH_MAX:
        yield (
            f"NAME must be at most {NAME_LENGTH_MAX} lowercase letters, digits and single hyphens, "
            f"and begin with a letter, not {name!r}"
        )
        return
    if iskeyword(module) or module in sys.stdlib_module_names:
        yield f"NAME {name!r} is a name of Python itself"
    if module == "tests":
        yield f"NAME {name!r} is the name of the folder of its tests"
    claimed = [plugin for plugin in plugins.discover(plugins.SHORT_GROUPS.get(group)) if plugin.name == name]
    if claimed:
        yield f"NAME {name!r} is installed already, by {claimed[0].package or 'a package without a name'}"
    elif any((one.metadata["Name"] or "").lower().replace("_", "-") == name for one in distributions()):
        yield f"NAME {name!r} is the name of an installed package"
    elif module not in sys.stdlib_module_names and find_spec(module) is not None:
        yield f"NAME {name!r} is the name of an installed module"


def _in_the_way(folder: Path) -> Iterator[str]:
    """Yield why a folder cannot be created."""
    if folder.exists() or folder.is_symlink():
        yield f"DIR has {folder.name!r} already: {folder}"
    elif not folder.parent.is_dir():
        yield f"DIR {str(folder.parent)!r} is not a folder"
