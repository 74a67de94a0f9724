"""Arms of a comparison, as users write them.

`fifo`, `fifo:mode=backfill:…` is a queue policy with its options; `full`, `paper:coda` is a profile, which has a policy
for each group. `ours=borda-mlfq,placement=count,queue.levels=2` is a label with choices: the queue policy or a profile,
then other groups by name and options as group.key=value. Unspecified choices come from the shared scenario. A value may
contain commas: `a=las,queue.thresholds=3250,7200`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from cotenant.core.model.validation import shown
from cotenant.core.policy.profiles import PROFILES
from cotenant.core.policy.protocols import QueuePolicy
from cotenant.core.spelling import did_you_mean
from cotenant.plugins import POLICY_GROUPS
from cotenant.simulator.scenario import Scenario

ARMS_MAX = 50
LABEL_LENGTH_MAX = 80


class BadArm(Exception):
    """An invalid arm; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class ComparedArm:
    """One of the compared arms: its label, and its scenario."""

    label: str
    scenario: Scenario


def arms_of(names: Sequence[str | QueuePolicy], labelled: Sequence[str], shared: Scenario) -> tuple[ComparedArm, ...]:
    """Return arms: `names` are profiles, or queue policies with optional options; `labelled` are labels with choices.

    A queue policy may be an object, too; its name is the label.

    >>> [arm.label for arm in arms_of(["fifo", "las:steal=2"], ["a=fifo,placement=count"], Scenario("t", "1x1"))]
    ['fifo', 'las:steal=2', 'a']

    Raises:
        BadArm: an arm is invalid, there is none, or two have the same label.
    """
    arms = [*(_named(text, shared) for text in names), *(_labelled(text, shared) for text in labelled)]
    if not arms:
        raise BadArm("there are no arms: name at least one with --arms or --arm")
    if len(arms) > ARMS_MAX:
        raise BadArm(f"there are {len(arms)} arms; at most {ARMS_MAX} can be compared at once")
    labels = [arm.label for arm in arms]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise BadArm(f"two arms are called {shown(twice)}; --arm LABEL=… gives an arm its own label")
    return tuple(arms)


def _named(text: str | QueuePolicy, shared: Scenario) -> ComparedArm:
    if not isinstance(text, str):
        return ComparedArm(text.name, shared.choosing({"queue": cast("str", text)}, {}))  # `simulate` takes objects
    if text.strip() in PROFILES:
        return ComparedArm(text.strip(), shared.under(PROFILES[text.strip()]))
    name, *pairs = text.strip().split(":")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key.strip() and equals):
            raise BadArm(f"arm {shown(text)}: {shown(pair)} is not written key=value, as in fifo:mode=backfill")
        options[key.strip()] = value
    if not name:
        raise BadArm(f"arm {shown(text)} names no queue policy")
    return ComparedArm(text.strip(), shared.as_arm({"queue": name}, {"queue": options}))


def _labelled(text: str, shared: Scenario) -> ComparedArm:
    label, equals, rest = text.partition("=")
    label = label.strip()
    if not (label and equals and rest.strip()) or len(label) > LABEL_LENGTH_MAX:
        raise BadArm(f"arm {shown(text)} is not written LABEL=POLICY,GROUP=NAME,GROUP.KEY=VALUE")
    if label.split(".")[0] in (*POLICY_GROUPS, "simulator"):
        raise BadArm(f"arm {shown(text)} needs a label before its choices, such as ours={shown(text)}")
    choices, options = _choices(text, rest)
    if choices.get("queue") in PROFILES:
        shared = shared.choosing({}, {"simulator": options.get("simulator", {})}).under(PROFILES[choices.pop("queue")])
    return ComparedArm(label, shared.as_arm(choices, options))


def _choices(text: str, rest: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return what follows the label: names of policies by group, and options by group and key."""
    names: dict[str, str] = {}
    options: dict[str, dict[str, str]] = {}
    for number, choice in enumerate(_pieces(rest)):
        key, equals, value = (part.strip() for part in choice.partition("="))
        if not equals:
            key, value = "queue", key
            if number:
                raise BadArm(f"arm {shown(text)}: {shown(choice)} is not written GROUP=NAME or GROUP.KEY=VALUE")
        group, dot, option = key.partition(".")
        if group not in POLICY_GROUPS and not (group == "simulator" and dot):
            raise BadArm(
                f"arm {shown(text)}: unknown group {shown(group)}{did_you_mean(group, [*POLICY_GROUPS, 'simulator'])}"
            )
        if not value or (dot and not option):
            raise BadArm(f"arm {shown(text)}: {shown(choice)} has no value")
        if dot:
            options.setdefault(group, {})[option] = value
        else:
            names[group] = value
    return names, options


def _pieces(rest: str) -> list[str]:
    """Split at commas; a piece without `=` belongs to the value before it, unless it is the first."""
    pieces: list[str] = []
    for piece in rest.split(","):
        if "=" in piece or not pieces or "=" not in pieces[-1]:
            pieces.append(piece)
        else:
            pieces[-1] += f",{piece}"
    return pieces
