from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from cotenant import plugins
from cotenant.plugins import BadOption, Plugin, UnknownPolicy

QUEUE = "cotenant.queue_policies"

GOOD = '''
from dataclasses import dataclass


class Shortest:
    """Runs the shortest job first.

    More about it.
    """

    name = "shortest"
    api_version = 1

    @dataclass(frozen=True)
    class Options:
        quantum: float = 60.0
        strict: bool = False

    def __init__(self, options):
        self.options = options

    def order(self, jobs, now):
        return []


class Plain:
    """Has no options."""

    name = "plain"
    api_version = 1
    order = Shortest.order
'''


class Site:
    """A directory on sys.path with packages as pip would install them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def install(
        self, package: str, code: str, points: dict[str, str], group: str = QUEUE, version: str = "1.2"
    ) -> None:
        module = package.replace("-", "_")
        (self._path / f"{module}.py").write_text(dedent(code))
        info = self._path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        lines = [f"{name} = {module}:{what}" for name, what in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))

    def written_later(self) -> None:
        now = self._path.stat().st_mtime_ns
        os.utime(self._path, ns=(now, now + 10**9))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def found(name: str, group: str = QUEUE) -> Plugin:
    (plugin,) = [plugin for plugin in plugins.discover(group) if plugin.name == name]
    return plugin


def test_a_policy_of_another_package_is_found_with_all_its_fields(site: Site) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest", "plain": "Plain"})
    assert replace(found("shortest"), policy=None) == Plugin(
        group=QUEUE,
        name="shortest",
        package="cotenant-shortest",
        version="1.2",
        api_version=1,
        healthy=True,
        error="",
        summary="Runs the shortest job first.",
        options={"quantum": "60", "strict": "false"},
    )


def test_newly_installed_policies_are_found_and_known_ones_read_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest"})
    read: list[object] = []

    def reading() -> object:
        read.append(entry_points())
        return read[-1]

    monkeypatch.setattr(plugins, "entry_points", reading)
    for _ in range(3):
        assert found("shortest").healthy
    assert len(read) == 1
    site.install("cotenant-plain", GOOD, {"plain": "Plain"})
    site.written_later()  # later than before, for a file system clock of some milliseconds
    assert found("plain").healthy
    assert len(read) == 2


def test_a_policy_is_made_with_its_options(site: Site) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest", "plain": "Plain"})
    assert plugins.load(QUEUE, "shortest").options.quantum == 60
    made = plugins.load(QUEUE, "shortest", {"quantum": "5", "strict": "yes"})
    assert (made.options.quantum, made.options.strict) == (5, True)
    assert found("shortest").make({"quantum": "7"}).options.quantum == 7
    assert plugins.load(QUEUE, "plain").name == "plain"


def test_bad_options_are_all_named_with_those_allowed(site: Site) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest", "plain": "Plain"})
    with pytest.raises(BadOption) as bad:
        plugins.load(QUEUE, "shortest", {"quantun": "5", "strict": "perhaps"})
    assert {one.field for one in bad.value.violations} == {"quantun", "strict"}
    assert "did you mean quantum?" in str(bad.value)
    assert "quantum=60, strict=false" in str(bad.value)
    with pytest.raises(BadOption, match="quantum: is not an option; this policy has none"):
        plugins.load(QUEUE, "plain", {"quantum": "5"})


def test_an_unknown_policy_is_answered_with_similar_names(site: Site) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest"})
    with pytest.raises(UnknownPolicy, match=r"there is no queue policy 'shotrest'; did you mean shortest\?") as unknown:
        plugins.load(QUEUE, "shotrest")
    assert unknown.value.near == ("shortest",)
    with pytest.raises(UnknownPolicy, match=r"there is no cpu allocator 'x'.* \(installed: .*requested"):
        plugins.load("cotenant.cpu_allocators", "x")


HEAD = """
from dataclasses import dataclass
class P:
    name, api_version = 'p', 1
    def order(self, jobs, now): ...
"""

BROKEN = {
    "raises": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    "needs": ("import a_library_that_is_not_there", "cannot be imported: ModuleNotFoundError"),
    "syntax": ("class P(", "cannot be imported: SyntaxError"),
    "lacks-it": ("class Q: ...", "cannot be imported: AttributeError"),
    "no-class": ("P = 7", "is not a class but 7"),
    "no-version": ("class P:\n    name = 'p'\n    def order(self): ...", "has no api_version"),
    "newer": (HEAD.replace("1", "2"), "uses version 2 of the policy API; this Cotenant supports version 1"),
    "odd-version": (HEAD.replace("1", "'one'"), "uses version 'one'"),
    "other-name": (HEAD.replace("'p'", "'q'"), "is installed as 'p' but calls itself 'q'"),
    "no-order": (HEAD.replace("order", "sort"), "lacks order()"),
    "no-dataclass": (HEAD + "    class Options: ...\n", "has invalid options: Options is no dataclass"),
    "thawed": (HEAD + "    @dataclass\n    class Options:\n        a: int = 1\n", "Options is not frozen"),
    "required": (
        HEAD + "    @dataclass(frozen=True)\n    class Options:\n        a: int\n",
        "option a has no default",
    ),
    "strange-type": (
        HEAD + "    @dataclass(frozen=True)\n    class Options:\n        a: dict = None\n",
        "option a has a type that cannot be read from text",
    ),
}


@pytest.mark.parametrize("package", BROKEN)
def test_a_broken_plug_in_is_reported_by_name_and_harms_no_other(site: Site, package: str) -> None:
    code, error = BROKEN[package]
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest"})
    site.install(package, code, {"p": "P"})
    broken = found("p")
    assert not broken.healthy
    assert error in broken.error
    assert (broken.package, broken.version) == (package, "1.2")
    assert found("shortest").healthy
    with pytest.raises(UnknownPolicy, match=f"queue policy 'p' of package {package} 1.2 cannot be used"):
        plugins.load(QUEUE, "p")


def test_a_constructor_that_fails_names_its_plug_in(site: Site) -> None:
    site.install("fails", HEAD + "    def __init__(self): raise OSError('no model file')\n", {"p": "P"})
    with pytest.raises(UnknownPolicy, match=r"'p' of package fails 1\.2 cannot be used: .*OSError: no model file"):
        plugins.load(QUEUE, "p")


def test_a_name_claimed_by_two_packages_is_refused(site: Site) -> None:
    site.install("first", HEAD, {"p": "P"})
    site.install("second", HEAD, {"p": "P"})
    claims = [plugin for plugin in plugins.discover(QUEUE) if plugin.name == "p"]
    assert [(plugin.package, plugin.healthy) for plugin in claims] == [("first", False), ("second", False)]
    assert claims[0].error == "'p' is claimed by more than one package: first, second"
    with pytest.raises(UnknownPolicy, match="claimed by more than one package"):
        plugins.load(QUEUE, "p")


def test_a_package_that_was_half_removed_clashes_like_others(site: Site, tmp_path: Path) -> None:
    site.install("first", HEAD, {"p": "P"})
    site.install("second", HEAD, {"p": "P"})
    (tmp_path / "second-1.2.dist-info" / "METADATA").unlink()
    claims = [plugin for plugin in plugins.discover(QUEUE) if plugin.name == "p"]
    assert [plugin.package for plugin in claims] == ["a package without a name", "first"]
    assert not any(plugin.healthy for plugin in claims)


def test_no_package_can_take_the_name_of_a_built_in_policy(site: Site) -> None:
    ours = entry_points(group=QUEUE, name="fifo")["fifo"]
    site.install("impostor", HEAD.replace("'p'", "'fifo'"), {"fifo": "P"})
    claims = {plugin.package: plugin for plugin in plugins.discover(QUEUE) if plugin.name == "fifo"}
    assert set(claims) == {"cotenant", "impostor"}
    assert "claimed by more than one package" in claims["impostor"].error
    assert "claimed" not in claims["cotenant"].error
    assert ours.value.startswith("cotenant.policies.")


def test_only_the_requested_module_is_imported(site: Site) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest"})
    site.install("heavy", "raise AssertionError('imported')", {"heavy": "P"})
    plugins.load(QUEUE, "shortest")
    assert "heavy" not in sys.modules


def test_plug_ins_are_listed_by_group_and_name(site: Site) -> None:
    site.install("cotenant-shortest", GOOD, {"shortest": "Shortest", "plain": "Plain"})
    listed = [(plugin.group, plugin.name) for plugin in plugins.discover()]
    assert listed == sorted(listed)
    assert {group for group, _ in listed} == set(plugins.GROUPS)


def test_an_unknown_group_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"unknown group 'cotenant\.queue'"):
        plugins.discover("cotenant.queue")


@pytest.mark.parametrize("group", plugins.GROUPS)
def test_a_group_asks_for_its_methods(site: Site, group: str) -> None:
    site.install("empty", "class P:\n    name, api_version = 'p', 1\n", {"p": "P"}, group)
    lacking: Any = [f"{method}()" for method in plugins.GROUPS[group]]
    assert found("p", group).error == (f"lacks {', '.join(lacking)}" if lacking else "")
