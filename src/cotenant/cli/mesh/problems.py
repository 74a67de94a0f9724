"""Problems of a mesh and their remedies, found in the reports of processes, store members and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from cotenant.cli.units import short_seconds
from cotenant.cli.views import View, validity_of
from cotenant.core.model.node import HealthAction
from cotenant.security.validity import Validity

NO_SPACE = "alarm:NOSPACE"  # reported by the capacity check, with commands that help
ELECTING = ("queue", "placement", "predictor")


@dataclass(frozen=True, slots=True)
class MeshProblem:
    """A problem: where it is, what it is, and its remedy."""

    where: str
    what: str
    remedy: str
    commands: tuple[str, ...] = ()  # that carry out the remedy, in order


def find_problems(
    processes: Sequence[View],
    members: Sequence[View],
    nodes: Sequence[View],
    now: datetime,
    trusts: Sequence[View] = (),
    capacity: View | None = None,
) -> list[MeshProblem]:
    """Return all problems, most pressing first; the arguments are views as `--json` prints them."""
    return [
        *_of_trust(trusts),
        *_of_capacity(capacity),
        *_of_store(members),
        *_of_services(processes),
        *_of_processes(processes),
        *_of_certificates(processes, nodes, now),
        *_of_nodes(nodes),
        *_of_releases(processes, nodes),
    ]


def certificate_problem(where: str, subject: str, validity: Validity, now: datetime) -> MeshProblem | None:
    """Return the problem of a certificate due for renewal; `subject` is its subject, "" if unknown."""
    if not validity.is_due(now):
        return None
    renewed = f"`cotenant certs rotate {subject}`" if subject else "have it reissued"
    return MeshProblem(
        where,
        f"its certificate {validity.in_words(now)}",
        f"{renewed}, then replace the old files; no restart is needed",
    )


def _of_trust(trusts: Sequence[View]) -> Iterator[MeshProblem]:
    """Yield why the store is not trusted, each reason once: processes differ only in their numbers."""
    wrong = {one["reason"]: one for one in reversed(trusts) if one["problem"]}
    for reason, one in sorted(wrong.items()):
        yield MeshProblem(
            "store", f"{reason}: {one['problem']}; nothing is written, and jobs keep running", one["remedy"]
        )


def _of_capacity(capacity: View | None) -> Iterator[MeshProblem]:
    if capacity and capacity["problem"]:
        yield MeshProblem("store", capacity["problem"], capacity["remedy"] or "", tuple(capacity["commands"]))


def _of_store(members: Sequence[View]) -> Iterator[MeshProblem]:
    """Yield unreachable members; without a quorum, reachable members that see no leader are not reported."""
    away = [one for one in members if one["release"] is None]
    quorum_lost = 2 * len(away) >= len(members) > 0
    if quorum_lost:
        remedy = "bring them back; until a quorum is reachable, no job starts, and running jobs continue"
        yield MeshProblem(
            "store", f"{len(away)} of {len(members)} members are unreachable, so nothing can be written", remedy
        )
    for one in members:
        if one["problem"] and NO_SPACE not in one["problem"] and (one in away or not quorum_lost):
            spare = len(members) - len(away) - (len(members) // 2 + 1)
            more = ": if one more fails, nothing can be written" if one in away and spare == 0 else ""
            yield MeshProblem(
                f"store {one['endpoint']}", one["problem"], f"bring it back{more}" if one in away else "see its log"
            )


def _of_services(processes: Sequence[View]) -> Iterator[MeshProblem]:
    for one in processes:
        if one["state"] == "away":
            remedy = "restart it; the end of its log shows why it stopped"
            yield MeshProblem(f"{one['service']} {one['address']}", one["problem"] or "it does not answer", remedy)
    for service in ELECTING:
        states = {one["state"] for one in processes if one["service"] == service}
        if "waits" in states and not states & {"leads", "serves"}:
            yield MeshProblem(
                service,
                "it has no leader",
                "electing one needs a reachable store: check the store, then the service's log",
            )


def _of_processes(processes: Sequence[View]) -> Iterator[MeshProblem]:
    """Yield the problems of processes; each once for a process that hosts several services."""
    found: dict[tuple[str, str], tuple[list[str], str]] = {}
    for one in processes:
        for problem in one["problems"]:
            services, _ = found.setdefault((one["address"], problem["reason"]), ([], problem["remedy"]))
            services.append(one["service"])
    for (address, reason), (services, remedy) in found.items():
        yield MeshProblem(f"{', '.join(services)} {address}", reason, remedy)


def _of_certificates(processes: Sequence[View], nodes: Sequence[View], now: datetime) -> Iterator[MeshProblem]:
    shown = [(f"{one['service']} {one['address']}", f"service/{one['service']}", validity_of(one)) for one in processes]
    shown += [(one["id"], f"agent/{one['id']}", validity_of(one)) for one in nodes]
    valid = [(validity.ends, where, subject, validity) for where, subject, validity in shown if validity]
    for _, where, subject, validity in sorted(valid, key=lambda one: one[:2]):
        if wrong := certificate_problem(where, subject, validity, now):
            yield wrong


def _of_nodes(nodes: Sequence[View]) -> Iterator[MeshProblem]:
    for one in nodes:
        if one["state"] in ("away", "lost"):
            since = "" if one["seen_seconds"] is None else f" for {short_seconds(one['seen_seconds'])}"
            gone = "its jobs were requeued" if one["state"] == "lost" else "its jobs are assumed to be running"
            remedy = f"restart its agent; if the node is permanently lost, run `cotenant forget {one['id']}`"
            yield MeshProblem(one["id"], f"its agent is {one['state']}{since}; {gone}", remedy)
        for problem in one["problems"]:
            where = f"{one['id']} {problem['gpu_uuid'] or ''}".strip()
            action = "" if problem["action"] == HealthAction.IGNORE else f"{problem['action']}: "
            yield MeshProblem(where, f"{action}{problem['reason']}", problem["remedy"])


def _of_releases(processes: Sequence[View], nodes: Sequence[View]) -> Iterator[MeshProblem]:
    """Yield processes and agents whose release differs from most services': an unfinished upgrade."""
    releases = Counter(one["release"] for one in processes if one["release"])
    if not releases:
        return
    most = max(releases, key=lambda release: (releases[release], release))
    remedy = f"upgrade it to {most}: mixed releases are supported only during an upgrade"
    others = {f"{one['service']} {one['address']}": one["release"] for one in processes if one["release"]}
    others |= {one["id"]: one["agent_version"] for one in nodes if one["agent_version"]}
    for where, release in others.items():
        if release != most:
            yield MeshProblem(where, f"runs release {release}, but most services run {most}", remedy)
