"""What is wrong with a mesh, and what helps: read from what its processes, its store's members and its nodes told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from cotenant.cli.units import short_seconds
from cotenant.cli.views import View, validity_of
from cotenant.core.model.node import HealthAction
from cotenant.security.validity import Validity

NO_SPACE = "alarm:NOSPACE"  # told with what helps by how full the store is
ELECTING = ("queue", "placement", "predictor")


@dataclass(frozen=True, slots=True)
class Wrong:
    """Where something is wrong, what it is, and what helps."""

    where: str
    what: str
    remedy: str
    commands: tuple[str, ...] = ()  # that do what the remedy says, in their order


def wrongs(
    processes: Sequence[View],
    members: Sequence[View],
    nodes: Sequence[View],
    now: datetime,
    trusts: Sequence[View] = (),
    capacity: View | None = None,
) -> list[Wrong]:
    """Name everything that is wrong, the most pressing first: of views as `--json` prints them."""
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


def certificate_wrong(where: str, bearer: str, validity: Validity, now: datetime) -> Wrong | None:
    """Tell of a certificate for which it is time; `bearer` is who `cotenant certs` issues it to, "" if not known."""
    if not validity.is_due(now):
        return None
    renewed = f"`cotenant certs rotate {bearer}`" if bearer else "have it issued anew"
    return Wrong(
        where,
        f"its certificate {validity.in_words(now)}",
        f"{renewed}, and put it in the place of the old one; nothing is restarted",
    )


def _of_trust(trusts: Sequence[View]) -> Iterator[Wrong]:
    """Name how the store is not the one that was written: each process says the same in numbers of its own."""
    wrong = {one["reason"]: one for one in reversed(trusts) if one["problem"]}
    for reason, one in sorted(wrong.items()):
        yield Wrong("store", f"{reason}: {one['problem']}; nothing is written, and jobs keep running", one["remedy"])


def _of_capacity(capacity: View | None) -> Iterator[Wrong]:
    if capacity and capacity["problem"]:
        yield Wrong("store", capacity["problem"], capacity["remedy"] or "", tuple(capacity["commands"]))


def _of_store(members: Sequence[View]) -> Iterator[Wrong]:
    """Name members that are away; those that are there and see no leader do so for want of the others."""
    away = [one for one in members if one["release"] is None]
    lost = 2 * len(away) >= len(members) > 0
    if lost:
        helps = "bring them back: until most are there nothing new starts, and what runs, runs on"
        yield Wrong("store", f"{len(away)} of {len(members)} members are away, so nothing can be written", helps)
    for one in members:
        if one["problem"] and NO_SPACE not in one["problem"] and (one in away or not lost):
            spare = len(members) - len(away) - (len(members) // 2 + 1)
            more = ": with one more away nothing can be written" if one in away and spare == 0 else ""
            yield Wrong(
                f"store {one['endpoint']}", one["problem"], f"bring it back{more}" if one in away else "see its log"
            )


def _of_services(processes: Sequence[View]) -> Iterator[Wrong]:
    for one in processes:
        if one["state"] == "away":
            helps = "start it; the end of its log says why it ended"
            yield Wrong(f"{one['service']} {one['address']}", one["problem"] or "it does not answer", helps)
    for service in ELECTING:
        states = {one["state"] for one in processes if one["service"] == service}
        if "waits" in states and not states & {"leads", "serves"}:
            yield Wrong(service, "nobody leads it", "it takes a store that answers; see there, and the service's log")


def _of_processes(processes: Sequence[View]) -> Iterator[Wrong]:
    """Name the problems of processes; of a process that serves several services, each once."""
    found: dict[tuple[str, str], tuple[list[str], str]] = {}
    for one in processes:
        for problem in one["problems"]:
            services, _ = found.setdefault((one["address"], problem["reason"]), ([], problem["remedy"]))
            services.append(one["service"])
    for (address, reason), (services, remedy) in found.items():
        yield Wrong(f"{', '.join(services)} {address}", reason, remedy)


def _of_certificates(processes: Sequence[View], nodes: Sequence[View], now: datetime) -> Iterator[Wrong]:
    shown = [(f"{one['service']} {one['address']}", f"service/{one['service']}", validity_of(one)) for one in processes]
    shown += [(one["id"], f"agent/{one['id']}", validity_of(one)) for one in nodes]
    valid = [(validity.ends, where, bearer, validity) for where, bearer, validity in shown if validity]
    for _, where, bearer, validity in sorted(valid, key=lambda one: one[:2]):
        if wrong := certificate_wrong(where, bearer, validity, now):
            yield wrong


def _of_nodes(nodes: Sequence[View]) -> Iterator[Wrong]:
    for one in nodes:
        if one["state"] in ("away", "lost"):
            since = "" if one["seen_seconds"] is None else f" for {short_seconds(one['seen_seconds'])}"
            gone = "its jobs were given up" if one["state"] == "lost" else "what runs there is believed to run on"
            helps = f"start its agent; `cotenant forget {one['id']}` where it will not come back"
            yield Wrong(one["id"], f"its agent is {one['state']}{since}; {gone}", helps)
        for problem in one["problems"]:
            where = f"{one['id']} {problem['gpu_uuid'] or ''}".strip()
            action = "" if problem["action"] == HealthAction.IGNORE else f"{problem['action']}: "
            yield Wrong(where, f"{action}{problem['reason']}", problem["remedy"])


def _of_releases(processes: Sequence[View], nodes: Sequence[View]) -> Iterator[Wrong]:
    """Name who runs another release than most services do: an upgrade that was not finished."""
    told = Counter(one["release"] for one in processes if one["release"])
    if not told:
        return
    most = max(told, key=lambda release: (told[release], release))
    helps = f"have it run {most} too: releases work beside each other for an upgrade, not for ever"
    others = {f"{one['service']} {one['address']}": one["release"] for one in processes if one["release"]}
    others |= {one["id"]: one["agent_version"] for one in nodes if one["agent_version"]}
    for where, release in others.items():
        if release != most:
            yield Wrong(where, f"it runs {release}, and most services run {most}", helps)
