"""A mesh that does not run as root: who may submit to it, and which files are hidden from its jobs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cotenant.cli.outcome import usage_error

if TYPE_CHECKING:
    from cotenant.cli.mesh.security_options import SecuritySettings
    from cotenant.cli.mesh.settings import Settings

MARK_FILE = "identity.json"
OVERRIDE_HINT = (
    "accept that with --shared-identity (or shared_identity = true), or run as root: then jobs run as their submitters"
)


def restrict_submitters(security_settings: SecuritySettings, settings: Settings, state_dir: Path) -> SecuritySettings:
    """Return security settings for a mesh with its own agents: one submitter only, unless identity is shared.

    Also records for `cotenant tokens` whether others may submit.

    Raises:
        CommandError: the settings admit other submitters without --shared-identity.
    """
    from cotenant.node_agent.runtime.run_as import user_name

    alone = os.geteuid() != 0 and not settings.shared_identity
    own = user_name(os.geteuid())
    if alone and (admitting := _setting_admitting_others(security_settings, own)):
        raise usage_error(
            f"{admitting} lets other users submit jobs, but every job of this mesh would run as its operator {own!r}",
            hint=OVERRIDE_HINT,
        )
    _write_mark(state_dir, own if alone else "")
    return replace(security_settings, only_user=own) if alone else security_settings


def _setting_admitting_others(security_settings: SecuritySettings, own: str) -> str:
    """Return the first setting that admits other submitters; "" if there is none."""
    from cotenant.node_agent.runtime.run_as import runs_as
    from cotenant.security.one_user import may_submit
    from cotenant.security.subjects import Subject

    if security_settings.oidc.issuer and security_settings.users.get("*") != own:
        return "[oidc]"
    for name, text in security_settings.bearers.items():
        try:
            subject = Subject.parse(text)
        except ValueError:
            continue  # reading the certificates reports the error
        if may_submit(subject.identity.roles) and not runs_as(own, subject.name, security_settings.users):
            return f"[bearers] {name!r}"
    return ""


def _write_mark(state_dir: Path, only_user: str) -> None:
    from cotenant.rpc.access import replace_file

    mark = state_dir / MARK_FILE
    with suppress(OSError):  # the mesh itself reports an unusable directory
        if only_user:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(mark, json.dumps({"only_user": only_user}))
        else:
            mark.unlink(missing_ok=True)


def check_token_for(name: str, state_dir: Path, *, insist: bool) -> str:
    """Return a warning about a new token of a submitter; "" if there is nothing to warn about.

    Raises:
        CommandError: the mesh of the state directory does not accept such a token.
    """
    from cotenant.node_agent.runtime.run_as import shared_identity_refusal

    if os.geteuid() == 0 or insist:
        return ""
    try:
        own = json.loads((state_dir / MARK_FILE).read_text())["only_user"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        own = None
    if not isinstance(own, str) or not own:
        return "an agent that does not run as root runs other users' jobs only with --shared-identity"
    if name == own:
        return ""
    raise usage_error(
        f"this mesh does not accept tokens of other users: {shared_identity_refusal(own, name)}",
        hint="start it with `cotenant up --shared-identity` and pass it here; viewers' tokens need neither",
    )


def secret_paths(settings: Settings, security_settings: SecuritySettings | None, state_dir: Path) -> tuple[Path, ...]:
    """Return the paths to hide from jobs if namespaces allow it: the state, and keys and tokens stored elsewhere."""
    from cotenant.cli.mesh.settings import archive_path
    from cotenant.rpc.access import default_config

    store = settings.store.removeprefix("sqlite:")
    found = [state_dir, default_config(os.environ).parent, archive_path(settings, state_dir)]
    elsewhere = (security_settings.tls.key, security_settings.audit.path) if security_settings else ()
    found += [Path(path).expanduser() for path in elsewhere if path]
    found += [Path(f"{store}{end}") for end in ("", "-wal", "-shm") if store != settings.store]
    return tuple(path.absolute() for path in found if path is not None)
