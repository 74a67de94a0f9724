"""What our own policies are held to beyond the laws of `cotenant.conformance`, which hold for all installed ones."""

from __future__ import annotations

import inspect
import re

import pytest

from cotenant import plugins
from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.node import NodeShape

DECIDING = [plugin for group in plugins.GROUPS if group != "cotenant.runtimes" for plugin in plugins.discover(group)]


@pytest.mark.parametrize("plugin", DECIDING, ids=lambda plugin: f"{plugin.group}:{plugin.name}")
def test_a_policy_documents_its_idea_its_source_and_an_example(plugin: plugins.Plugin) -> None:
    if plugin.package != plugins.OURS:
        pytest.skip("how a policy of another package is documented is its own matter")
    told = inspect.getdoc(plugin.policy) or ""
    cites = re.search(r"\b(19|20)\d\d\b.*\[[PDCR]\]", told, re.DOTALL)
    assert cites or "baseline" in told, "neither a paper with its tag nor a baseline"
    assert re.search(r"^>>> ", told, re.MULTILINE), "no doctest"


def test_an_explicit_number_of_cores_is_honoured_by_all() -> None:
    spec = JobSpec(roles=(Role(request=Request(1000, cores=0)), Role(request=Request(1000, cores=7))))
    for plugin in plugins.discover("cotenant.cpu_allocators"):
        assert plugin.make().size(spec, UNKNOWN, [NodeShape(8, 24)]).cores == (0, 7), plugin.name
