"""`sacctmgr`: lists the caller's accounts, which are the tenants of Cotenant; it changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.slurm.arguments import read
from cotenant.cli.slurm.finding import PAGE_SIZE
from cotenant.cli.slurm.outcome import SlurmError
from cotenant.cli.slurm.table import Cell, Column, lines
from cotenant.cli.slurm.users import user_name
from cotenant.v1.process_service_pb2 import GetCallerRequest, GetCallerResponse
from cotenant.v1.tenant_service_pb2 import ListTenantsRequest

NAME = "sacctmgr"
CLUSTER = "cotenant"
DEFAULT = "default"
WIDTH = 10
OPTIONS = {
    "n": "noheader", "noheader": "noheader", "p": "parsable", "parsable": "parsable", "P": "parsable2",
    "parsable2": "parsable2", "s": "associations", "associations": "associations", "i": "immediate",
    "immediate": "immediate", "r": "readonly", "readonly": "readonly", "Q": "quiet", "quiet": "quiet",
    "v": "verbose", "verbose": "verbose", "h": "help", "help": "help",
}  # fmt: skip
HELP = """\
Usage: sacctmgr [-n] [-p|-P] [-s] list|show user|association|account|cluster [NAME…] [format=FIELD[%WIDTH],…]
Lists the accounts that the caller may use: the tenants of Cotenant. `cotenant tenants` changes them."""


class Association(NamedTuple):
    """An account that a user may submit to."""

    user: str
    account: str
    default: str


_FIELDS: Mapping[str, Column[Association]] = {
    column.heading.lower(): column
    for column in (
        Column[Association]("Account", lambda one: one.account),
        Column[Association]("Admin", lambda one: "None"),
        Column[Association]("Cluster", lambda one: CLUSTER),
        Column[Association]("DefaultAccount", lambda one: one.default),
        Column[Association]("Partition", lambda one: ""),
        Column[Association]("QOS", lambda one: "normal"),
        Column[Association]("Share", lambda one: "1"),
        Column[Association]("User", lambda one: one.user),
    )
}
_ENTITIES = {  # the fields that each shows by default
    "users": "User,DefaultAccount,Admin",
    "associations": "Cluster,Account,User,Partition,Share,QOS",
    "accounts": "Account",
    "clusters": "Cluster",
}


def main(words: Sequence[str]) -> int:
    """List accounts and return the exit code.

    Raises:
        SlurmError: the command is none that only lists, or a field does not exist.
        CommandError: the mesh cannot be reached.
    """
    given, others = read(NAME, words, OPTIONS)
    if "help" in given:
        print(HELP)
        return 0
    entity, names, preset = _request(others, with_accounts="associations" in given)
    cells = _cells(preset)
    rows = _distinct(entity, with_mesh(Flags(), _associations), "associations" in given)
    shown = [one for one in rows if not names or _name(entity, one) in names]
    if "parsable" in given or "parsable2" in given:
        end = "|" if "parsable" in given else ""
        heading = [] if "noheader" in given else [[cell.column.heading for cell in cells]]
        for texts in [*heading, *([cell.column.value(one) for cell in cells] for one in shown)]:
            print("|".join(texts) + end)
        return 0
    table = list(lines(cells, shown, heading="noheader" not in given))
    if "noheader" not in given:
        table.insert(1, "".join(f"{'-' * cell.width} " for cell in cells))
    print("\n".join(table), end="\n" if table else "")
    return 0


def _request(words: Sequence[str], *, with_accounts: bool) -> tuple[str, set[str], str]:
    """Return what is listed, the names that it is limited to, and its fields."""
    command, entity, *rest = [*words, "", ""]
    if command.lower() not in ("list", "show"):
        raise SlurmError(f"{command or 'no command'}: accounts are changed with `cotenant tenants`")
    found = next((known for known in _ENTITIES if len(entity) > 1 and known.startswith(entity.lower())), None)
    if found is None:
        raise SlurmError(f"No valid entity in list command: {entity!r}; {', '.join(_ENTITIES)} can be listed")
    fields = _ENTITIES["associations" if with_accounts else found]
    names: set[str] = set()
    for word in filter(None, rest):
        key, assigned, value = word.partition("=")
        if assigned and key.lower() == "format":
            fields = value
        elif assigned and key.lower().rstrip("s") not in ("name", "user", "account", "cluster"):
            raise SlurmError(f"Unknown condition: {word}")
        elif key.lower() not in ("withassoc", "where"):
            names.update(filter(None, (value if assigned else word).split(",")))
    return found, names, fields


def _cells(text: str) -> list[Cell[Association]]:
    cells = []
    for part in filter(None, text.split(",")):
        name, percent, width = part.partition("%")
        key = name.strip().lower()
        found = next((column for known, column in _FIELDS.items() if len(key) > 1 and known.startswith(key)), None)
        if found is None or (percent and not width.lstrip("-").isdecimal()):
            raise SlurmError(f"Unknown field '{part}'")
        cells.append(Cell(found, int(width.lstrip("-")) if percent else WIDTH, not width.startswith("-"), after=" "))
    return cells


async def _associations(mesh: Mesh) -> list[Association]:
    """Return the accounts of the caller; those of a caller with all tenants are the ones that the mesh knows."""
    address, called, _ = mesh.entries()[0]
    caller: GetCallerResponse = await mesh.process_stub(address, called).GetCaller(GetCallerRequest())
    accounts = list(caller.tenants)
    if caller.all_tenants:
        accounts, token = [DEFAULT], ""
        while True:
            page = await mesh.tenants.ListTenants(ListTenantsRequest(page_size=PAGE_SIZE, page_token=token))
            accounts += [tenant.id for tenant in page.tenants]
            if not (token := page.next_page_token):
                break
    accounts = list(dict.fromkeys(accounts))
    first = DEFAULT if DEFAULT in accounts or not accounts else accounts[0]
    return [Association(user_name(), account, first) for account in accounts]


def _distinct(entity: str, found: Sequence[Association], with_accounts: bool) -> list[Association]:
    """Return a row for each association, or for each user, account or cluster."""
    if with_accounts or entity == "associations":
        return list(found)
    return list({_name(entity, one): one for one in reversed(found)}.values())[::-1]


def _name(entity: str, one: Association) -> str:
    return {"accounts": one.account, "clusters": CLUSTER}.get(entity, one.user)
