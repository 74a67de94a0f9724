"""Draws docs/health.md from the table in cotenant.core: `make docs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cotenant.core.failures.launch_health import RULES as HOLD_RULES
from cotenant.core.model.health_rules import GPU_RULES, NODE_RULES, RULES, TABLE_VERSION, Rule
from cotenant.core.model.node import HealthAction

PAGE = Path(__file__).resolve().parent.parent / "docs" / "health.md"

TEXT = """\
# The health of nodes and GPUs

The agent of each node looks every five seconds, and at once when the driver tells of something: at its GPUs, through
NVML, and at the node's disk, memory and load. What it finds is judged by the tables below, told to placement when it
changes, and shown by `cotenant nodes`. The tables are version {version}; `make docs` draws this page from the code, and
a test fails where it is not what the code says.

## What may follow

{actions}

A GPU that is not well is missing in what is free. `cotenant explain` tells a waiting job how many such GPUs and nodes
there are (`unhealthy_gpus`, `unhealthy_nodes`). An attempt that is stopped for its node's health is queued again at
once, and no failure is counted.

A node on which launches fail is held too, by placement: see below. A node that is not well as a whole is shown as
`cordoned` or `draining` with the owner `health`. That is no cordon of an operator's: `cotenant uncordon` does not end
what the agent has found, and when the node is well again, a cordon or drain that an operator has ordered stays.

## The way back

Each finding ends by itself, with a new load of the driver, with a reboot, or by an operator's word, as the tables say.
`cotenant release NODE GPU` ends all findings of one GPU; the agent looks anew, and what is still so is found again.
Findings are kept in the agent's directory (`health.json`): neither a restart of the agent nor of placement forgets
them. A reboot ends all of them that are no longer so.

To reset one GPU by hand: wait until its job has gone, stop the agent (jobs run on), `nvidia-smi --gpu-reset -i INDEX`,
start the agent, `cotenant release NODE GPU`. The agent must be stopped because its connection to NVML keeps the GPU
open.

## When NVML does not answer

NVML is asked by a small process of its own. An answer that does not come within 5 s (60 s at its start) costs that
process its life; another one is started after a while, never beside one that cannot be killed. Until it answers, all
GPUs of the node are held: what runs, runs on; nothing new comes; nothing that was found of them is forgotten.

## Nodes that cannot launch

A launch that fails before the program is executed is the node's failure, never the job's: the job is queued again at
once, avoids that node for 30 s, and its story says `not launched`. After {failures} launches in a
row that fail within {window} min, of different attempts, placement holds the node: `unhealthy: cannot launch: …`. So it
does where {jobs} jobs of {tenants} tenants fail within {quick} s of their start on one node (a black hole), if other
jobs of those tenants do well on other nodes, their programs do not fail quickly there too, and no job has done well on
the node since. One tenant's broken jobs hold no node, and neither does one user whom a node does not know.

A held node gets one queued job at a time, a canary: {canary} s after it was held, then at intervals that double to
{canary_max} min. A canary that is launched ends the hold; on a black hole it must also run for {quick} s or succeed,
and one that fails there is not blamed on its job. Jobs that only held nodes could take wait with the reason
`NODES_HELD`, which names the nodes and the time of the next try. `cotenant uncordon NODE` ends a hold at once, unless
the node is cordoned or drained by an operator: then it takes back that alone. A hold is kept with the node, so that
the next leader of placement knows it and tries the node after {canary} s; the failures before it are counted anew.

In the configuration file of placement: `launch_failures` and `quick_failures` (0: never), `canary_seconds` and
`canary_seconds_max`. Metrics: `cotenant.placement.nodes_held`, `launch_failures` and `canaries`; the alert is
`NodesHeld`.

## Who uses a GPU

At each look, before a GPU is given to an attempt, and after an attempt has ended, NVML's processes are compared with
those of the attempts that were given the GPU. Somebody else's process takes the GPU out of service, with its pid, name
and user, until it is gone. An attempt that comes to such a GPU is refused after 5 s with `gpu_busy: …`, which is no
failure of its own; the end of an attempt is told once its GPUs are free, or after 5 s with the GPU held back. MPS
servers and `nvidia-persistenced` do not count. Declared GPUs (`fake:N`) have no such check, and neither does an agent
in a PID namespace of its own, which says so under `not_enforced`.

## The node

{node}
## GPUs

{gpu}
## XIDs

An XID is an error of which the driver tells. {xid_note}

{xid}"""

XID_NOTE = """Most are the program's own doing: they are told and nothing else, for the
program ends by itself. An XID that is not in the table is told and nothing else as well. Each XID is taken from NVML
as an event with its GPU, never parsed from the kernel's log."""

ACTIONS = {
    HealthAction.IGNORE: "It is told, and nothing else follows.",
    HealthAction.HOLD: "The GPU, or the node, gets no new work; what runs there runs on.",
    HealthAction.RESTART: "Attempts that use the GPU now are stopped and queued again; it takes new work.",
    HealthAction.QUARANTINE: "The GPU gets no new work; attempts that use it are stopped and queued again.",
    HealthAction.DRAIN: "The node gets no new work, and all its attempts are stopped and queued again.",
}


def page() -> str:
    """Write the whole page."""
    xids = sorted((rule for rule in RULES.values() if rule.check == "xid"), key=lambda rule: int(rule.name[4:]))
    return TEXT.format(
        version=TABLE_VERSION,
        actions="\n".join(f"- **{action}**: {told}" for action, told in ACTIONS.items()),
        node=table(NODE_RULES),
        gpu=table(GPU_RULES),
        xid=table([*xids[1:], xids[0]]),
        xid_note=XID_NOTE,
        failures=HOLD_RULES.failures,
        window=f"{HOLD_RULES.window_seconds / 60:g}",
        jobs=HOLD_RULES.quick_jobs,
        tenants=HOLD_RULES.quick_tenants,
        quick=f"{HOLD_RULES.quick_seconds:g}",
        canary=f"{HOLD_RULES.canary_seconds:g}",
        canary_max=f"{HOLD_RULES.canary_seconds_max / 60:g}",
    )


def table(rules: Iterable[Rule]) -> str:
    """Write rules as rows."""
    head = "| check | what | action | after | the way back | source |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(cells(rule))} |\n" for rule in rules)


def cells(rule: Rule) -> list[str]:
    """Write one rule's row."""
    name = rule.name.removeprefix("xid_") if rule.check == "xid" else rule.check
    after = f"{rule.after_seconds:g} s" if rule.after_seconds else "at once"
    name = "others" if name == "0" else name
    return [name, rule.meaning, f"**{rule.action}**", after, rule.remedy, rule.source]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   {PAGE.relative_to(PAGE.parent.parent)} is drawn")
