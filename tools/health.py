"""Generates docs/health.md from the tables in cotenant.core: `make docs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cotenant.core.failures.launch_health import RULES as HOLD_RULES
from cotenant.core.model.health_rules import GPU_RULES, NODE_RULES, RULES, TABLE_VERSION, Rule
from cotenant.core.model.node import HealthAction

PAGE = Path(__file__).resolve().parent.parent / "docs" / "health.md"

TEXT = """\
# The health of nodes and GPUs

The agent of each node checks every five seconds, and immediately on a driver event: the GPUs, through NVML, and the
disk, memory and load of the node. It evaluates its findings by the tables below and reports changes to placement;
`cotenant nodes` shows them. The tables are version {version}; `make docs` draws this page from the code, and a test
fails if it differs.

## Actions

{actions}

An unhealthy GPU does not count as free. `cotenant explain` shows a waiting job how many such GPUs and nodes there are
(`unhealthy_gpus`, `unhealthy_nodes`). An attempt that is stopped because of the health of its node is queued again
immediately, and no failure is counted.

Placement also holds a node on which launches fail: see below. A node that is unhealthy as a whole is shown as
`cordoned` or `draining` with the owner `health`. This is separate from an operator's cordon: `cotenant uncordon` does
not clear the findings of the agent, and when the node is healthy again, a cordon or drain by an operator remains.

## Recovery

Each finding ends by itself, when the driver is reloaded, with a reboot, or by an operator's command, as the tables say.
`cotenant release NODE GPU` clears all findings of one GPU; the agent then checks again and reports what is still wrong.
Findings are kept in the agent's directory (`health.json`) and survive restarts of the agent and of placement. A reboot
clears all findings that no longer apply.

To reset one GPU by hand: wait until its job has ended, stop the agent (jobs keep running), run `nvidia-smi --gpu-reset
-i INDEX`, start the agent, run `cotenant release NODE GPU`. The agent must be stopped because its connection to NVML
keeps the GPU open.

## When NVML does not answer

A small separate process calls NVML. If a call takes longer than 5 s (60 s at startup), the agent kills that process and
starts another one after a while, but never while the old process cannot be killed. Until NVML answers, all GPUs of the
node are held: running jobs continue, no new jobs start, and no finding is forgotten.

## Nodes that cannot launch

A launch that fails before the program is executed is the node's failure, never the job's: the job is queued again at
once, avoids that node for 30 s, and its history says `not launched`. After {failures} consecutive failed launches of
different attempts within {window} min, placement holds the node: `unhealthy: cannot launch: …`. Placement also holds a
node on which {jobs} jobs of {tenants} tenants fail within {quick} s of their start (a black hole), if other jobs of
those tenants run well on other nodes, their programs do not fail quickly there too, and no job has run well on the
node since. The broken jobs of a single tenant do not hold a node, and neither does a single user who is unknown on a
node.

A held node gets one queued job at a time, a canary: {canary} s after the hold began, then at intervals that double up
to {canary_max} min. A canary that is launched ends the hold; on a black hole it must also run for {quick} s or
succeed, and a canary that fails there does not count as a failure of its job. Jobs that only held nodes could take
wait with the reason `NODES_HELD`, which lists the nodes and the time of the next canary. `cotenant uncordon NODE` ends
a hold at once, unless an operator cordoned or drained the node: then the command undoes only that. A hold is stored
with the node, so the next leader of placement knows it and sends a canary after {canary} s; the count of failures
before it starts from zero.

In the configuration file of placement: `launch_failures` and `quick_failures` (0: never), `canary_seconds` and
`canary_seconds_max`. Metrics: `cotenant.placement.nodes_held`, `launch_failures` and `canaries`; the alert is
`NodesHeld`.

## Foreign processes on a GPU

At each check, before a GPU is given to an attempt, and after an attempt has ended, the processes that NVML lists are
compared with those of the attempts that hold the GPU. A foreign process takes the GPU out of service until it is gone;
the finding shows its pid, name and user. An attempt that arrives at such a GPU is refused after 5 s with `gpu_busy:
…`, which is not a failure of the job. The end of an attempt is reported once its GPUs are free, or after 5 s with the
GPU held. MPS servers and `nvidia-persistenced` do not count. Declared GPUs (`fake:N`) have no such check, and neither
has an agent in its own PID namespace, which lists this under `not_enforced`.

## The node

{node}
## GPUs

{gpu}
## XIDs

An XID is an error that the driver reports. {xid_note}

{xid}"""

XID_NOTE = """\
Most are caused by the program itself: they are reported without any action, because the program ends by itself. The
same holds for an XID that is not in the table. Each XID comes from NVML as an event with its GPU, never from the
kernel's log."""

ACTIONS = {
    HealthAction.IGNORE: "Reported, without any action.",
    HealthAction.HOLD: "The GPU or node gets no new work; running jobs continue.",
    HealthAction.RESTART: "Attempts that use the GPU are stopped and queued again; the GPU takes new work.",
    HealthAction.QUARANTINE: "The GPU gets no new work; attempts that use it are stopped and queued again.",
    HealthAction.DRAIN: "The node gets no new work; all its attempts are stopped and queued again.",
}


def page() -> str:
    """Return the whole page."""
    xids = sorted((rule for rule in RULES.values() if rule.check == "xid"), key=lambda rule: int(rule.name[4:]))
    return TEXT.format(
        version=TABLE_VERSION,
        actions="\n".join(f"- **{action}**: {effect}" for action, effect in ACTIONS.items()),
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
    """Return rules as a table."""
    head = "| check | condition | action | after | recovery | source |\n|---|---|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(cells(rule))} |\n" for rule in rules)


def cells(rule: Rule) -> list[str]:
    """Return the cells of one rule."""
    name = rule.name.removeprefix("xid_") if rule.check == "xid" else rule.check
    after = f"{rule.after_seconds:g} s" if rule.after_seconds else "immediately"
    name = "others" if name == "0" else name
    return [name, rule.meaning, f"**{rule.action}**", after, rule.remedy, rule.source]


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
