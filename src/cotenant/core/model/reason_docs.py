"""The meaning of each reason to wait, its numbers, and what changes it: the table behind `docs/reasons.md`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cotenant.core.model.refusal import Code
from cotenant.core.model.resources import KINDS, in_list


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of a reason; `numbers` maps the beginnings of number names to what they count."""

    means: str
    remedy: str
    numbers: Mapping[str, str] = field(default_factory=dict)


_NAMES = ", ".join(f"`{kind.name}`" + " (thousandths)" * (kind.name == "gpu_milli") for kind in KINDS)
_REMOVABLE = ", or no ".join(f"`{kind.name}`" for kind in KINDS[1:])
_NOUNS = in_list([kind.noun for kind in KINDS])
_AVOIDED = {
    "avoided_nodes": "nodes that the job avoids for a while; the other numbers do not count them",
    "yielded_nodes": "nodes that the job would avoid too, if any other node could ever hold it",
}

MEANINGS: Mapping[Code, Meaning] = MappingProxyType(
    {
        Code.CAPACITY: Meaning(
            "Too little is free in total, counted on the nodes that could ever hold a replica.",
            "Running jobs end, or nodes join. `cotenant explain` names the jobs that it waits for.",
            {
                "wanted_": f"what the job needs of each scarce resource: {_NAMES}",
                "free_": "what is free of it",
                "unhealthy_gpus": "unhealthy GPUs, not counted as free",
                **_AVOIDED,
            },
        ),
        Code.FRAGMENTED: Meaning(
            "Enough is free in total, but not together where a replica, or the whole gang, must be placed.",
            "Jobs on one server, or in one rack, end; or the job asks for smaller replicas, or accepts replicas "
            "farther apart. Under a policy that relaxes locality, waiting is enough: the reason says when.",
            {
                "wanted_replicas": "replicas of the role that does not fit",
                "room_replicas": "how many there is room for, at most as many as wanted on each node",
                "best_": "how many the best node (`best_node_replicas`) or rack (`best_rack_replicas`) has room for",
                "nodes_with_room": "nodes with room for one or more",
                "racks_with_room": "racks with room for one or more",
                "fits_without_": f"1 where the job would fit if it needed no {_REMOVABLE}",
                **_AVOIDED,
            },
        ),
        Code.NEVER_FITS: Meaning(
            "The whole cluster, empty, could not hold it; or a service with `auto` replicas would answer too late "
            "even with its maximum of replicas. Most such jobs are rejected when they are submitted.",
            "Ask for less per replica, more replicas or another GPU type, or add larger nodes; for a service: a higher "
            "`replicas_max`, a longer target, or fewer requests.",
            {
                "largest_": f"{_NOUNS} of the largest node",
                "replicas_needed": "for a service: the fewest replicas that meet its latency objective",
                "replicas_max": "for a service: its maximum of replicas",
                "latency_seconds": "for a service: the latency with that maximum",
                "arrivals_max": "for a service: about the requests per second that the maximum answers in time",
                "target_seconds": "for a service: its latency objective",
            },
        ),
        Code.BEHIND: Meaning(
            "The queue is strict: the job at its head does not fit, and no job may pass it. The reason names the head, "
            "and why the head waits.",
            "The head starts or is cancelled; or the queue is set to backfill (`fifo`: `mode=backfill`).",
        ),
        Code.OUTRANKED: Meaning(
            "Under a preemptive queue policy: the jobs before it in the order take so much of the cluster that this "
            "job no longer fits.",
            "Jobs before it end, or fall in the order; or its priority is raised.",
            {
                "rank": "its position among the waiting jobs, from 1",
                "ahead": "waiting jobs before it",
                "left_": f"what the jobs before it leave: {_NAMES}",
                "ahead_gpu_milli": "GPUs requested by the waiting jobs before it, in thousandths",
                "score": "its score within its priority and level; the lowest runs first",
                "nearest_score": "the score of the job right before it",
                "head_": "in a strict order: what the job at its head needs, which does not fit and which no job may "
                "pass",
            },
        ),
        Code.MAKING_ROOM: Meaning(
            "Its places are chosen; jobs there must first stop, move, or give cores back.",
            "These jobs do so, within their grace.",
        ),
        Code.QOS: Meaning(
            "Where there is room, a neighboring service, or the job itself, would be slowed beyond its objective; or "
            "the job would be spread so widely that it takes many times its GPU-seconds.",
            "The neighbors end; or objectives are relaxed; or the job accepts places anywhere.",
            {
                "speed": "steps per second that it would make there",
                "wanted": "the steps per second of its objective",
                "times": "the GPU-seconds it would take there, relative to those on the fewest nodes",
                "nodes": "the number of nodes there",
                "slowed_jobs": "how many other jobs would miss their objectives",
                "best_node_replicas": "how many replicas the best node has room for",
                **_AVOIDED,
            },
        ),
        Code.QUOTA: Meaning(
            "Its tenant, or a tenant above it, would hold more than its limit.",
            "Jobs of the tenant end, or its limit is raised (`cotenant tenants set`).",
            {
                "held_": "what the tenant holds of each resource that is at its limit",
                "wanted_": "what the job needs of it",
                "limit_": "the limit",
            },
        ),
        Code.NO_NODES: Meaning(
            "No node takes new work, or no node that could hold the job does.",
            "A node joins, or is uncordoned (`cotenant nodes`).",
            {
                "closed_nodes": "nodes that take no work",
                "unhealthy_nodes": "those of them that are unhealthy (`cotenant nodes`)",
                "unhealthy_gpus": "unhealthy GPUs, without which it does not fit",
                **_AVOIDED,
            },
        ),
        Code.SUSPENDED: Meaning("Its owner holds it back.", "`cotenant resume ID`."),
        Code.BACK_OFF: Meaning("Its last attempt failed; the next one is delayed (back-off).", "The time passes."),
        Code.BEGIN_TIME: Meaning(
            "It was submitted with a begin time (`--begin`) that is still to come.",
            "The time passes.",
            {"begin_seconds": "the begin time, in unix seconds"},
        ),
        Code.SECRETS: Meaning(
            "It names a secret (`--secret`) that was deleted after the job was submitted.",
            "`cotenant secrets set NAME`, or cancel the job.",
            {"missing_secrets": "the number of secrets that its tenant does not have"},
        ),
        Code.NOT_YET_CONSIDERED: Meaning(
            "It has just arrived or was just requeued: the next cycle, within milliseconds, considers it.",
            "Wait; if this lasts, the queue or placement service is down.",
        ),
        Code.GIVEN_UP: Meaning(
            "The queue policy no longer sees any use in running it.",
            "A later deadline, or other options of the policy.",
        ),
        Code.DEPENDENCY: Meaning(
            "It was submitted to start after other jobs.",
            "Those jobs succeed, or end, as required.",
            {"left_": "how many of those jobs are left, by condition"},
        ),
        Code.ARRAY_LIMIT: Meaning(
            "The array already runs as many jobs as its limit allows.",
            "Other jobs of the array end.",
            {
                "running_max": "the limit",
                "holding": "how many hold resources",
                "waiting": "how many wait",
            },
        ),
        Code.RESERVED: Meaning(
            "There is room, but it is reserved for a gang that has waited very long, and this job might not finish in "
            "time.",
            "That gang starts; or the job has an expected run time that is short enough.",
            _AVOIDED,
        ),
        Code.NODES_HELD: Meaning(
            "All open nodes that could hold it are held: launches fail there, or every launched job fails.",
            "A held node tries one queued job at a time, a canary; if it succeeds, the node takes work again. Repair "
            "the node, and see `cotenant nodes`; `cotenant uncordon` ends a hold at once.",
            {
                "held_nodes": "how many nodes that could hold it are held",
                "next_canary_seconds": "seconds until the next of them may be tried",
                **_AVOIDED,
            },
        ),
        Code.POLICY_FAILED: Meaning(
            "The placement policy has a bug: it failed on the job, or offered resources it must not use.",
            "Fix the policy, or choose another one.",
        ),
    }
)
