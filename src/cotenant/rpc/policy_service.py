"""Lists the installed policies: one PolicyService for all services of a server."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cotenant import plugins
from cotenant.codec.errors import Violation, invalid
from cotenant.core.spelling import did_you_mean
from cotenant.plugins import GROUPS, Plugin
from cotenant.rpc.paging import page_of
from cotenant.v1 import policy_service_pb2, policy_service_pb2_grpc

if TYPE_CHECKING:  # a client without the parts of a server only encodes policies
    from cotenant.rpc.server import Server

SERVICE = "cotenant.v1.PolicyService"


class PolicyServicer(policy_service_pb2_grpc.PolicyServiceServicer):
    """Lists the policies of the groups that this server's services use, and marks the active ones.

    >>> policies = PolicyServicer()
    >>> policies.use("cotenant.predictors", "history")
    """

    def __init__(self, discover: Callable[[], Sequence[Plugin]] = plugins.discover) -> None:
        self._discover = discover
        self._active: dict[str, dict[str, Mapping[str, str]]] = defaultdict(dict)  # configured options, by name
        self._found: Sequence[Plugin] | None = None
        self._finding = asyncio.Lock()

    def use(self, group: str, *names: str, options: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> None:
        """Declare that a service here uses a group and these policies of it, with options by name.

        Declarations add up.
        """
        if group not in GROUPS:
            raise ValueError(f"unknown group {group!r}; the groups are {', '.join(GROUPS)}")
        self._active[group].update({name: options.get(name, {}) for name in names})

    async def ListPolicies(
        self, request: policy_service_pb2.ListPoliciesRequest, context: Any
    ) -> policy_service_pb2.ListPoliciesResponse:
        """List a page of the policies of this server's groups; broken ones with their error."""
        if request.group and request.group not in GROUPS:
            problem = f"{request.group!r} is not one of {', '.join(GROUPS)}{did_you_mean(request.group, GROUPS)}"
            raise invalid([Violation("group", problem)])
        found = {
            f"{plugin.group} {plugin.name} {plugin.package}": plugin
            for plugin in await self._plugins()
            if plugin.group in self._active and request.group in ("", plugin.group)
        }
        scope = f"policies {request.group}"
        ids, token = page_of(sorted(found), request.page_size, request.page_token, scope=scope)
        shown = [policy_of(found[id], self._active[found[id].group].get(found[id].name)) for id in ids]
        return policy_service_pb2.ListPoliciesResponse(policies=shown, next_page_token=token)

    async def _plugins(self) -> Sequence[Plugin]:
        """Discover all policies once. This imports them, which can take seconds, so it runs in a thread."""
        async with self._finding:
            if self._found is None:
                self._found = await asyncio.to_thread(self._discover)
            return self._found


def policy_of(plugin: Plugin, given: Mapping[str, str] | None = None) -> policy_service_pb2.Policy:
    """Encode a policy; it is active if it is healthy and `given` is not None (an empty mapping: no options)."""
    return policy_service_pb2.Policy(
        group=plugin.group,
        name=plugin.name,
        package=plugin.package,
        version=plugin.version,
        api_version=plugin.api_version,
        healthy=plugin.healthy,
        error=plugin.error,
        active=plugin.healthy and given is not None,
        summary=plugin.summary,
        options=dict(plugin.options),
        options_given=given,
    )


def serve_policies(server: Server) -> PolicyServicer:
    """Add a PolicyService to a server; each service on it then declares what it uses."""
    servicer = PolicyServicer()
    server.add(policy_service_pb2_grpc.add_PolicyServiceServicer_to_server, servicer, SERVICE)
    return servicer
