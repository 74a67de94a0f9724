"""`cotenant store`: check that the store is the one the mesh wrote, and recover if it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.mesh.store_evidence import StoreEvidence, gather_evidence, url_of
from cotenant.cli.outcome import Exit, ExitCode
from cotenant.cli.render import Column, print_card, print_table
from cotenant.deferred import asyncio

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="sqlite:PATH or etcd://HOST:PORT,…; default: the state directory's store."
    ),
]
COLUMNS = (
    Column("WITNESS", elastic=True),
    Column("STORE"),
    Column("GENERATION", right=True),
    Column("REVISION", right=True),
    Column("VERDICT", styled=True),
)


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(no_args_is_help=True, help="Check the store, or accept one that lost recent writes.")
    group.command("status")(status)
    group.command("accept-regression")(accept_regression)
    app.add_typer(group, name="store")


def status(context: typer.Context, store: StoreOption = "", as_json: options.AsJson = False) -> None:
    """Show whether the store is trusted.

    Shows the store's identity and revision, and what processes and agents remember of them.

    The exit code is 0 if the store matches their memory, 1 if it is older or a different store, and 3 if neither the
    mesh nor the store can be reached. An SQLite file can only be read while no mesh uses it.

    \b
    Examples:
      cotenant store status
      cotenant store status --store etcd://10.0.0.1:2379 --json
    """
    evidence = asyncio.run(gather_evidence(Flags.of(context), resolve_state_dir(context), store))
    verdicts = dict(_verdicts(evidence))
    wrong = [text for text in verdicts.values() if text]
    if as_json:
        views.print_json(_view(evidence, verdicts))
    else:
        _show(evidence, verdicts)
    if evidence.look is None and not evidence.trusts:
        raise Exit(ExitCode.UNREACHABLE)
    if wrong:
        raise Exit(ExitCode.FAILED)


def accept_regression(
    context: typer.Context,
    store: StoreOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be lost or changed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Accept an older or different store.

    Prefer to restore the right data: stop etcd, restore its newest snapshot or data directory, and start it; or restore
    the SQLite file with its -wal and -witness. The mesh then resumes by itself. Accept the present store only if the
    right data is lost. With etcd, leave a running mesh running: jobs in its memory are written back to the store.
    Attempts that run on this machine's nodes but are missing in the store are adopted. An SQLite file belongs to one
    process: stop `cotenant up` first; jobs keep running.

    \b
    Examples:
      cotenant store accept-regression --dry-run
      cotenant store accept-regression --store etcd://10.0.0.1:2379 --yes
    """
    from cotenant.cli.mesh.store_accepting import RegressionAcceptance

    work = RegressionAcceptance(
        Flags.of(context), resolve_state_dir(context), url_of(resolve_state_dir(context), store)
    )
    asyncio.run(work.run(dry_run=dry_run, ask=not yes, as_json=as_json))


def _verdicts(evidence: StoreEvidence) -> Iterator[tuple[str, str]]:
    """Yield each witness and its objection to the store; "" if it has none."""
    from cotenant.store.witness import compare_store

    for one in evidence.trusts:
        yield f"process {one['address']}", one["problem"] or ""
    if evidence.look is None:
        return
    if evidence.look.verdict:
        yield "the store itself", evidence.look.verdict.text
    for witness in evidence.witnesses:
        if verdict := compare_store(witness.memory, evidence.look.seen, witness.name):
            yield witness.name, verdict.text


def _view(evidence: StoreEvidence, verdicts: dict[str, str]) -> dict[str, Any]:
    seen = evidence.look.seen if evidence.look else None
    identity = seen.identity if seen else None
    return {
        "trusted": not any(verdicts.values()),
        "store": {
            "id": identity.id if identity else None,
            "generation": identity.generation if identity else None,
            "revision": seen.revision if seen else None,
            "not_looked_at": evidence.why_not or None,
        },
        "problems": [{"witness": name, "problem": text} for name, text in verdicts.items() if text],
        "witnesses": [
            {
                "name": one.name,
                "store_id": one.memory.id,
                "generation": one.memory.generation,
                "revision": one.memory.revision,
            }
            for one in evidence.witnesses
        ],
    }


def _show(evidence: StoreEvidence, verdicts: dict[str, str]) -> None:
    from cotenant.store.port import StoreDistrusted

    wrong = list(dict.fromkeys(text for text in verdicts.values() if text))
    card = [("verdict", "not trusted; nothing is written" if wrong else "trusted")]
    if evidence.look and (identity := evidence.look.seen.identity):
        card += [("store", identity.id), ("generation", str(identity.generation))]
        card += [("revision", str(evidence.look.seen.revision))]
    elif evidence.why_not:
        card.append(("store", f"not read: {evidence.why_not}"))
    if wrong:  # the other texts differ only in numbers
        card += [("problem", wrong[0]), ("", StoreDistrusted.remedy)]
    print_card(card)
    rows = [
        [
            one.name,
            one.memory.id[:8],
            str(one.memory.generation or "-"),
            str(one.memory.revision or "-"),
            "disagrees" if verdicts.get(one.name) else "agrees",
        ]
        for one in evidence.witnesses
    ]
    print_table(COLUMNS, rows, nothing="no witnesses of this store yet")
