"""What each reason to wait means, which numbers come with it, and what changes it: `docs/reasons.md` in a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cotenant.core.model.refusal import Code


@dataclass(frozen=True, slots=True)
class Meaning:
    """A reason in words: `numbers` are by the beginning of their names, each with what it counts."""

    means: str
    remedy: str
    numbers: Mapping[str, str] = field(default_factory=dict)


_AVOIDED = {
    "avoided_nodes": "nodes that it keeps away from for a while, which the other numbers do not count",
    "yielded_nodes": "nodes that it would keep away from too, if others could ever hold it",
}

MEANINGS: Mapping[Code, Meaning] = MappingProxyType(
    {
        Code.CAPACITY: Meaning(
            "What is free does not suffice in sum, counted on the nodes that could ever hold a replica.",
            "Running jobs end, or nodes join. `cotenant explain` names those whose end it waits for.",
            {
                "wanted_": "what the job needs of each resource that is short: `gpu_milli` (thousandths), `cores`, "
                "`memory_bytes`",
                "free_": "what is free of it",
                "unhealthy_gpus": "GPUs that are not well, and not counted as free",
                **_AVOIDED,
            },
        ),
        Code.FRAGMENTED: Meaning(
            "Enough is free in sum, but not together where a replica, or the whole gang, has to be.",
            "Jobs on one server, or in one rack, end; smaller replicas; a job that is content with places farther "
            "apart. Under a policy that relaxes, time alone: the reason says when.",
            {
                "wanted_replicas": "replicas of the role that finds no room",
                "room_replicas": "how many there is room for, at most as many as wanted on each node",
                "best_": "how many the best node (`best_node_replicas`) or rack (`best_rack_replicas`) has room for",
                "nodes_with_room": "nodes with room for one or more",
                "racks_with_room": "racks with room for one or more",
                "fits_without_": "1 where the job would fit if it needed no `cores`, or no `memory_bytes`",
                **_AVOIDED,
            },
        ),
        Code.NEVER_FITS: Meaning(
            "All of the cluster, empty, could not hold it, or a service that leaves its replicas open would answer too "
            "late with the most that it may have. Most such jobs are refused when they are submitted.",
            "Less per replica, more replicas, another type of GPU, or larger nodes; of a service: a higher "
            "`replicas_max`, a longer target, or fewer requests.",
            {
                "largest_": "GPUs, cores and memory of the largest node",
                "replicas_needed": "of a service: the fewest replicas that keep its promise",
                "replicas_max": "of a service: the most that it may have",
                "latency_seconds": "of a service: the latency that those keep",
                "arrivals_max": "of a service: about the requests per second that those answer in time",
                "target_seconds": "of a service: the latency that it promises",
            },
        ),
        Code.BEHIND: Meaning(
            "The queue is strict: the job at its head does not fit, and nobody may pass it. The reason names the head, "
            "and why that one waits.",
            "The head starts or is cancelled; or the queue is set to backfill (`fifo`: `mode=backfill`).",
        ),
        Code.OUTRANKED: Meaning(
            "Under a queue policy that stops jobs for others: those that come first in its order take so much of the "
            "cluster that this one does not fit any more.",
            "Jobs before it end, or fall in the order; a higher priority.",
            {
                "rank": "its place among those that wait, from 1",
                "ahead": "waiting jobs before it",
                "left_": "what those leave who go before it: `gpu_milli` (thousandths), `cores`, `memory_bytes`",
                "ahead_gpu_milli": "GPUs that the waiting jobs before it ask for, in thousandths",
                "score": "what the order gave it, of its priority and level; the lower runs first",
                "nearest_score": "the same of the job right before it",
                "head_": "of a strict order: what the job needs that does not fit, and that nobody may pass",
            },
        ),
        Code.MAKING_ROOM: Meaning(
            "Its places are chosen; who is there has to stop first, to move, or to give cores back.",
            "They do so, within their grace.",
        ),
        Code.QOS: Meaning(
            "Where there is room, a service beside it, or the job itself, would be slowed beyond what was promised; or "
            "the job would be spread so far that it takes many times its GPU-seconds.",
            "The neighbours end; looser promises; a job that is content with places anywhere.",
            {
                "speed": "steps per second that it would make there",
                "wanted": "the steps per second that it promises",
                "times": "how many times the GPU-seconds of the fewest nodes it would take there",
                "nodes": "on how many nodes that is",
                "slowed_jobs": "how many others would fall below what they promise",
                "best_node_replicas": "how many replicas the best node has room for",
                **_AVOIDED,
            },
        ),
        Code.QUOTA: Meaning(
            "Its tenant, or one that this belongs to, would hold more than its limit.",
            "Jobs of the tenant end, or its limit is raised (`cotenant tenants set`).",
            {
                "held_": "what the tenant holds of each resource that is at its limit",
                "wanted_": "what the job needs of it",
                "limit_": "the limit",
            },
        ),
        Code.NO_NODES: Meaning(
            "No node takes new work, or none of those that could hold the job does.",
            "A node joins, or is uncordoned (`cotenant nodes`).",
            {
                "closed_nodes": "nodes that take no work",
                "unhealthy_nodes": "those of them that are not well (`cotenant nodes`)",
                "unhealthy_gpus": "GPUs that are not well, without which it does not fit",
                **_AVOIDED,
            },
        ),
        Code.SUSPENDED: Meaning("Its owner holds it back.", "`cotenant resume ID`."),
        Code.BACK_OFF: Meaning("Its last attempt failed; the next one waits a little.", "The time passes."),
        Code.NOT_YET_CONSIDERED: Meaning(
            "It has just come, or was just given back: the next cycle, within milliseconds, considers it.",
            "Nothing has to be done; where it lasts, the queue or placement is away.",
        ),
        Code.GIVEN_UP: Meaning(
            "The queue policy sees no use in running it any more.", "A later deadline, or other options of the policy."
        ),
        Code.DEPENDENCY: Meaning(
            "It was submitted to start after other jobs.",
            "They succeed, or end, as was asked.",
            {"left_": "how many of them there are, by what is waited for"},
        ),
        Code.ARRAY_LIMIT: Meaning(
            "As many jobs of its array as may run at once do.",
            "Others of the array end.",
            {
                "running_max": "how many may",
                "holding": "how many hold resources",
                "waiting": "how many wait",
            },
        ),
        Code.RESERVED: Meaning(
            "There is room, but it is kept for a gang that has waited for very long, and the job would not be done in "
            "time.",
            "That gang starts, or a run time that is known to be short enough.",
            _AVOIDED,
        ),
        Code.NODES_HELD: Meaning(
            "All nodes that could hold it and would take work are held: launches fail there, or all that is launched.",
            "A held node launches a canary, one queued job at a time, and takes work again. Mend the node, and look at "
            "`cotenant nodes`; `cotenant uncordon` ends a hold at once.",
            {
                "held_nodes": "how many nodes that could hold it are held",
                "next_canary_seconds": "when the next of them may be tried, in seconds from then",
                **_AVOIDED,
            },
        ),
        Code.POLICY_FAILED: Meaning(
            "The placement policy has a bug: it failed on the job, or offered what it may not.",
            "The policy is mended, or another one is chosen.",
        ),
    }
)
