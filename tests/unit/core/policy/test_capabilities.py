from __future__ import annotations

from typing import Protocol, runtime_checkable

import pytest

from cotenant import plugins
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import ChecksNeighbors, Rearranges, Reclaims, UsesClusterView
from cotenant.core.policy.protocols import DefinesEquivalence, Learns
from cotenant.core.sizing.resize import Resizes

GROUPS = ("cotenant.queue_policies", "cotenant.placement_policies", "cotenant.cpu_allocators")


@pytest.mark.parametrize(
    "protocol", [DefinesEquivalence, ChecksNeighbors, Learns, Rearranges, Reclaims, Resizes, UsesClusterView]
)
def test_capabilities_agree_with_isinstance(protocol: type) -> None:
    policies = [plugins.load(plugin.group, plugin.name) for group in GROUPS for plugin in plugins.discover(group)]
    following = [policy for policy in policies if isinstance(policy, protocol)]
    assert [policy for policy in policies if capability_of(policy, protocol)] == following
    assert following


@runtime_checkable
class Base(Protocol):
    def first(self) -> int: ...


@runtime_checkable
class Both(Base, Protocol):
    count: int

    def second(self) -> int: ...


class Whole:
    count = 0

    def first(self) -> int:
        return 1

    def second(self) -> int:
        return 2


class WithoutTheInherited:
    count = 0

    def second(self) -> int:
        return 2


class WithoutTheCount:
    def first(self) -> int:
        return 1

    def second(self) -> int:
        return 2


class TakenBack(Whole):
    second = None  # type: ignore[assignment]  # as a subclass removes a method


@pytest.mark.parametrize("kind", [Whole, WithoutTheInherited, WithoutTheCount, TakenBack])
def test_inherited_and_plain_members_count_and_a_method_that_is_none_does_not(kind: type) -> None:
    assert (capability_of(kind(), Both) is not None) == isinstance(kind(), Both) == (kind is Whole)
