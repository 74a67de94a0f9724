"""Which policies a run is about: those named by `--policy`, else all that are installed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cotenant import extras, plugins
from cotenant.core.spelling import did_you_mean

SELECTED = pytest.StashKey[list[plugins.Plugin]]()


def selection_of(config: pytest.Config) -> list[plugins.Plugin]:
    """Return the policies that a run of pytest is about.

    Raises:
        pytest.UsageError: see `selected`.
    """
    if SELECTED not in config.stash:
        names, group = config.getoption("--policy", []), config.getoption("--group", "")
        config.stash[SELECTED] = selected(names, group)
    return config.stash[SELECTED]


def selected(names: Sequence[str], group: str) -> list[plugins.Plugin]:
    """Return the policies that a run is about.

    Raises:
        pytest.UsageError: names every policy that is not installed, cannot be loaded, or exists in several groups.
    """
    every = plugins.SHORT_GROUPS if names or not extras.missing(["agent"]) else plugins.POLICY_GROUPS
    groups = [plugins.SHORT_GROUPS[group]] if group else list(every.values())
    installed = [plugin for one in groups for plugin in plugins.discover(one)]
    if not names:
        return installed
    wrong = [fault for name in names if (fault := _fault(name, [one for one in installed if one.name == name]))]
    if unknown := [name for name in names if name not in {one.name for one in installed}]:
        known = sorted({one.name for one in installed})
        wrong += [f"no policy {name!r} is installed{did_you_mean(name, known)}" for name in unknown]
    if wrong:
        raise pytest.UsageError("; ".join(wrong))
    return [plugin for plugin in installed if plugin.name in names]


def _fault(name: str, found: Sequence[plugins.Plugin]) -> str:
    """Return why the policies of a name cannot be held to laws; "" if they can, or there are none."""
    if broken := [plugin for plugin in found if not plugin.healthy]:
        return f"the policy {name!r} of {broken[0].package or 'an unnamed package'} {broken[0].error}"
    short = [group for group, full in plugins.SHORT_GROUPS.items() if full in {plugin.group for plugin in found}]
    if len(short) > 1:
        return f"{name!r} is a policy of the groups {' and '.join(short)}: choose one with --group"
    return ""
