"""`cotenant policies`: installed policies, their packages, and whether they load; with `new` and `bench`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from cotenant import plugins
from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, command_error, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.new_policy import new
from cotenant.cli.mesh.policy_bench import bench
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.pages import pages
from cotenant.cli.render import Column, print_table
from cotenant.codec.errors import from_error
from cotenant.core.policy.profiles import DEFAULT, GROUPS, PROFILES, Profile
from cotenant.core.spelling import did_you_mean
from cotenant.deferred import asyncio, grpc
from cotenant.rpc.policy_service import policy_of
from cotenant.v1.policy_service_pb2 import ListPoliciesRequest, Policy

GROUP_PREFIX = "cotenant."
COLUMNS = (
    Column("GROUP"),
    Column("NAME"),
    Column("PACKAGE", elastic=True),
    Column("VERSION", elastic=True),
    Column("OK", styled=True),
    Column("ACTIVE"),
    Column("DESCRIPTION / ERROR", elastic=True),
)
PROFILE_COLUMNS = (
    Column("PROFILE"),
    *(Column(group.upper(), elastic=group == "predictor") for group in GROUPS),
    Column("DESCRIPTION", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(policies)
    group.command("new")(new)
    group.command("bench")(bench)
    app.add_typer(group, name="policies")


def policies(
    context: typer.Context,
    group: Annotated[str, typer.Option(metavar="GROUP", help="Only this group, such as queue_policies.")] = "",
    here: Annotated[
        bool, typer.Option("--here", help="Only policies of this Python installation, without asking the mesh.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show profiles and what each contains instead.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List installed policies and whether they load; or write a policy of your own, and time it.

    Lists the policies of the mesh and marks the active ones; without a reachable mesh, those of this Python.

    \b
    Examples:
      cotenant policies
      cotenant policies --here
      cotenant policies --profile
      cotenant policies --group queue_policies --json
      cotenant policies new queue small-first
      cotenant policies bench small-first
    """
    if context.invoked_subcommand is not None:
        return
    if profile:
        _print_profiles(as_json=as_json)
        return
    full = group if not group or group.startswith(GROUP_PREFIX) else f"{GROUP_PREFIX}{group}"
    found = _installed(full) if here else _known(Flags.of(context), full)
    if as_json:
        views.print_json([_view(policy) for policy in found])
        return
    print_table(COLUMNS, [_row(policy) for policy in found], nothing="no policies")


def _print_profiles(*, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_profile_view(profile) for profile in PROFILES.values()], indent=2))
        return
    rows = [
        [profile.name + (" (default)" if profile.name == DEFAULT else ""), *profile.names().values(), profile.summary]
        for profile in PROFILES.values()
    ]
    print_table(PROFILE_COLUMNS, rows, nothing="no profiles")


def _profile_view(profile: Profile) -> Mapping[str, object]:
    options = {group: dict(own) for group, own in profile.options.items()}
    return {"name": profile.name, "summary": profile.summary, **profile.names(), "options": options}


def _installed(group: str) -> list[Policy]:
    """Return the policies installed with this command."""
    if group and group not in plugins.GROUPS:
        raise usage_error(
            f"--group must be one of {', '.join(plugins.GROUPS)}, not {group!r}{did_you_mean(group, plugins.GROUPS)}"
        )
    return [policy_of(plugin) for plugin in plugins.discover() if group in ("", plugin.group)]


def _known(flags: Flags, group: str) -> list[Policy]:
    """Return the mesh's policies; without a reachable mesh, those installed here."""
    try:
        return with_mesh(flags, lambda mesh: _collected(mesh, group))
    except CommandError as error:
        if error.code is not ExitCode.UNREACHABLE:
            raise
        found = _installed(group)
        note(f"showing policies installed here, without active marks: the mesh is unreachable: {error.message}")
        return found


async def _collected(mesh: Mesh, group: str) -> list[Policy]:
    """Return the policies of all services, merged; fails only if no service answers."""
    stubs = mesh.policies()
    request = ListPoliciesRequest(group=group)
    answers = await asyncio.gather(*(_listed(stub, request) for stub in stubs.values()), return_exceptions=True)
    joined: dict[tuple[str, str, str], Policy] = {}
    failures: dict[str, grpc.aio.AioRpcError] = {}
    for service, answer in zip(stubs, answers, strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            failures[service] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            _join(joined, answer)
    if len(failures) == len(stubs):
        raise next(iter(failures.values()))
    for service, failure in failures.items():
        note(f"cannot list policies of {service}: {command_error(from_error(failure)).message}")
    return [joined[key] for key in sorted(joined)]


async def _listed(stub: Any, request: ListPoliciesRequest) -> list[Policy]:
    return [policy async for page in pages(stub.ListPolicies, request) for policy in page.policies]


def _join(joined: dict[tuple[str, str, str], Policy], found: Iterable[Policy]) -> None:
    """Merge one service's policies; a policy is active if any service uses it."""
    for policy in found:
        known = joined.setdefault((policy.group, policy.name, policy.package), policy)
        known.active = known.active or policy.active


def _view(policy: Policy) -> views.View:
    return {
        "group": policy.group,
        "name": policy.name,
        "package": policy.package,
        "version": policy.version,
        "api_version": policy.api_version,
        "healthy": policy.healthy,
        "error": policy.error,
        "active": policy.active,
        "summary": policy.summary,
        "options": dict(sorted(policy.options.items())),
    }


def _row(policy: Policy) -> list[str]:
    return [
        policy.group.removeprefix(GROUP_PREFIX),
        policy.name,
        policy.package,
        policy.version,
        "yes" if policy.healthy else "no",
        "*" if policy.active else "",
        policy.summary if policy.healthy else policy.error,
    ]
