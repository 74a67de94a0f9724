"""A mesh that does not run as root: who may submit to it, and what its jobs are not to see."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cotenant.cli.mesh.security_options import Guarding
from cotenant.cli.mesh.settings import Settings
from cotenant.cli.outcome import usage

MARK_FILE = "identity.json"
INSIST = (
    "--shared-identity (or shared_identity = true in the settings) accepts that; root runs jobs as their submitters"
)


def guarded(guarding: Guarding, settings: Settings, state_dir: Path) -> Guarding:
    """Return what guards a mesh with agents of its own, and note for `cotenant tokens` whether others may submit.

    Raises:
        CommandError: the settings let others submit, and nobody has said that they may share our identity.
    """
    from cotenant.node_agent.runtime.run_as import user_name

    alone = os.geteuid() != 0 and not settings.shared_identity
    own = user_name(os.geteuid())
    if alone and (letting := _letting_others_in(guarding, own)):
        raise usage(
            f"{letting} lets other people submit jobs, and every job of this mesh would run as {own!r}, who runs it",
            hint=INSIST,
        )
    _note(state_dir, own if alone else "")
    return replace(guarding, only_user=own) if alone else guarding


def refusal_of(guarding: Guarding) -> Callable[[str], str]:
    """Return what says why a caller may not submit; "" where it may."""
    from cotenant.node_agent.runtime.run_as import refusal_of_others, runs_as

    own = guarding.only_user
    return lambda name: "" if runs_as(own, name, guarding.users) else refusal_of_others(own, name)


def _letting_others_in(guarding: Guarding, own: str) -> str:
    """Return the first setting by which somebody else could submit; "" where there is none."""
    from cotenant.node_agent.runtime.run_as import runs_as
    from cotenant.security.one_user import submits
    from cotenant.security.subjects import Bearer

    if guarding.oidc.issuer and guarding.users.get("*") != own:
        return "[oidc]"
    for name, text in guarding.bearers.items():
        try:
            bearer = Bearer.parse(text)
        except ValueError:
            continue  # whoever reads the certificates says what is wrong with it
        if submits(bearer.identity.roles) and not runs_as(own, bearer.name, guarding.users):
            return f"[bearers] {name!r}"
    return ""


def _note(state_dir: Path, only_user: str) -> None:
    from cotenant.rpc.access import replace_file

    mark = state_dir / MARK_FILE
    with suppress(OSError):  # the mesh itself says what is wrong with a directory that it cannot use
        if only_user:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(mark, json.dumps({"only_user": only_user}))
        else:
            mark.unlink(missing_ok=True)


def check_token_for(name: str, state_dir: Path, *, insist: bool) -> str:
    """Return what to say of a new token for somebody who may submit jobs; "" where there is nothing to say.

    Raises:
        CommandError: the mesh of the state directory takes no such token.
    """
    from cotenant.node_agent.runtime.run_as import refusal_of_others

    if os.geteuid() == 0 or insist:
        return ""
    try:
        own = json.loads((state_dir / MARK_FILE).read_text())["only_user"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        own = None
    if not isinstance(own, str) or not own:
        return "an agent that does not run as root runs jobs of other people only with --shared-identity"
    if name == own:
        return ""
    raise usage(
        f"this mesh takes no tokens of other people: {refusal_of_others(own, name)}",
        hint="start it with `cotenant up --shared-identity`, and pass the same here; a viewer's token needs neither",
    )


def secret_paths(settings: Settings, guarding: Guarding | None, state_dir: Path) -> tuple[Path, ...]:
    """What jobs are not to see where namespaces can hide it: all state, and keys and tokens that lie elsewhere."""
    from cotenant.cli.mesh.settings import archive_of
    from cotenant.rpc.access import default_config

    store = settings.store.removeprefix("sqlite:")
    found = [state_dir, default_config(os.environ).parent, archive_of(settings, state_dir)]
    elsewhere = (guarding.tls.key, guarding.audit.path) if guarding else ()
    found += [Path(path).expanduser() for path in elsewhere if path]
    found += [Path(f"{store}{end}") for end in ("", "-wal", "-shm") if store != settings.store]
    return tuple(path.absolute() for path in found if path is not None)
