"""The process of one plan, `python -m cotenant.simulator.plan_process`; it is killed when the plan is no longer wanted.

On standard input comes one line of JSON, a `PlanQuestion`, and then the snapshot. On standard output goes one JSON
object: `plan`, or `field` and `error` if the input is wrong, or `failed` if a policy is.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cotenant.core.policy.options import BadOption
from cotenant.core.policy.profiles import UnknownProfile
from cotenant.plugins import UnknownPolicy
from cotenant.simulator import snapshots
from cotenant.simulator.plan_view import plan_view
from cotenant.simulator.policy_set import PolicyFailed
from cotenant.simulator.snapshot_plan import SOURCE, Choices, PlanLimits, plan_snapshot
from cotenant.simulator.traces.trace_job import BadTrace

NICENESS = 10  # a scheduler may run on the same machine
GRACE_SECONDS = 5  # between the limit of processor time and its enforcement


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is asked besides the snapshot: the fields of `Choices` and of `PlanLimits`, and the seed."""

    profile: str
    policies: Mapping[str, str]
    options: Mapping[str, Mapping[str, str]]
    nodes_max: int
    jobs_max: int
    seconds_max: float
    cpu_seconds_max: int
    seed: int


def main() -> None:
    """Make one plan."""
    question = PlanQuestion(**json.loads(sys.stdin.buffer.readline()))  # from the process that started this one
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (question.cpu_seconds_max, question.cpu_seconds_max + GRACE_SECONDS))
    print(json.dumps(answer(question, sys.stdin.buffer.read()), ensure_ascii=False))


def answer(question: PlanQuestion, document: bytes) -> dict[str, Any]:
    """Return the plan, or what is wrong."""
    until = time.monotonic() + question.seconds_max
    try:
        taken = snapshots.parse(document, SOURCE)
        PlanLimits(question.nodes_max, question.jobs_max, question.seconds_max).check(taken)
        choices = Choices(question.profile, question.policies, question.options)
        plan = plan_snapshot(taken, choices, seed=question.seed, spent=lambda: time.monotonic() > until)
    except BadTrace as error:
        return {"field": "snapshot", "error": str(error)}
    except UnknownProfile as error:
        return {"field": "profile", "error": str(error)}
    except UnknownPolicy as error:
        return {"field": "policies", "error": str(error)}
    except BadOption as error:
        return {"field": "options", "error": str(error)}
    except PolicyFailed as error:
        return {"failed": str(error)}
    return {"plan": plan_view(plan)}


if __name__ == "__main__":
    main()
