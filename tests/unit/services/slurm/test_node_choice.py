"""The nodes of pending jobs, by lists of excluded nodes that leave enough."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.services.slurm.pictures import NOW, picture

from cotenant import plugins
from cotenant.services.slurm import node_choice
from cotenant.services.slurm.node_choice import NodeChoice, changes, chosen_nodes, dump, load, without_lists
from cotenant.services.slurm.placement_view import ledger_of, ruled_out
from cotenant.services.slurm.planning import scene_of
from cotenant.services.slurm.records import Placed, SlurmJob, SlurmNode

MAIN = frozenset({"main"})
NODES = [SlurmNode(f"n{n}", cores=16, gpus=4, partitions=MAIN) for n in (1, 2, 3)]
CPU_NODE = SlurmNode("c1", cores=16, partitions=MAIN)
PENDING = SlurmJob("7", 7, cpus=4, priority=5, reason="Priority", submitted_seconds=NOW - 60, partitions=("main",))
FGD = plugins.load("cotenant.placement_policies", "fgd")


def chosen(*jobs: SlurmJob, nodes: list[SlurmNode] | None = None) -> dict[str, NodeChoice]:
    """Return the choices for these jobs."""
    scene = scene_of(picture(nodes or [*NODES, CPU_NODE], *jobs), NOW, {})
    return chosen_nodes(scene, FGD, np.random.default_rng(0))


def test_a_job_without_gpus_is_kept_from_nodes_with_gpus() -> None:
    gpu_jobs = SlurmJob("1", 1, "RUNNING", cpus=4, gpus_total=2, gpus_per_node=2, placed=(Placed("n1", gpus=(0, 1)),))
    waiting = replace(PENDING, id="8", number=8, gpus_total=4, gpus_per_node=4, priority=1)
    found = chosen(gpu_jobs, PENDING, waiting)
    assert found["7"].nodes == ("c1",)
    assert found["7"].excluded == ("n1", "n2", "n3")


@pytest.mark.parametrize(
    "job",
    [
        replace(PENDING, excluded_nodes=("n1",)),
        replace(PENDING, required_nodes=("n1",)),
        replace(PENDING, reason="Dependency"),
        replace(PENDING, priority=0),
        replace(PENDING, array=7, task=3),
        replace(PENDING, het=7),
        replace(PENDING, reservation="r"),
        replace(PENDING, cpus=400),
    ],
    ids=["excludes", "requires", "depends", "held", "array", "het", "reserved", "too-large"],
)
def test_other_jobs_are_left_alone(job: SlurmJob) -> None:
    assert chosen(job) == {}


def test_lists_that_no_longer_hold_are_withdrawn_unless_a_user_changed_them() -> None:
    ours = {"7": ("n1",), "8": ("n1",), "9": ("n2",)}
    jobs = (
        replace(PENDING, excluded_nodes=("n1",)),
        replace(PENDING, id="8", excluded_nodes=("n1", "n3")),
        replace(PENDING, id="9", excluded_nodes=("n2",)),
    )
    wanted = {"9": NodeChoice("9", ("n1",), ("n3",)), "7b": NodeChoice("7b", ("n1",), ("n2",))}
    assert changes(picture(NODES, *jobs), ours, wanted) == {"7": (), "9": ("n3",), "7b": ("n2",)}
    cleaned = without_lists(picture(NODES, *jobs), ours)
    assert [cleaned.jobs[name].excluded_nodes for name in "789"] == [(), ("n1", "n3"), ()]


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(1, 3), st.booleans(), st.sampled_from("123")),
        max_size=12,
    )
)
def test_as_many_nodes_with_room_are_left_as_a_job_needs(rows: list[tuple[int, int, int, bool, str]]) -> None:
    jobs = [
        SlurmJob(
            str(n),
            n,
            "RUNNING" if runs else "PENDING",
            cpus=cpus,
            gpus_total=gpus,
            nodes_min=1 if runs else count,
            priority=n,
            reason="" if runs else "Resources",
            partitions=("main",),
            placed=(Placed(f"n{node}"),) if runs else (),
        )
        for n, (cpus, gpus, count, runs, node) in enumerate(rows, 1)
    ]
    shown = picture([*NODES, CPU_NODE], *jobs)
    scene = scene_of(shown, NOW, {})
    ledger, _ = ledger_of(shown)
    for choice in chosen_nodes(scene, FGD, np.random.default_rng(0)).values():
        job = shown.jobs[choice.job]
        open_nodes = {*shown.nodes} - {*ruled_out(job, scene.specs[job.id], shown, ledger)}
        assert len(open_nodes - {*choice.excluded}) >= job.nodes_min
        assert {*choice.excluded} < open_nodes


def test_lists_are_kept_over_restarts_and_damaged_ones_are_refused() -> None:
    assert load(dump({"7": ("n1", "n2")})) == {"7": ("n1", "n2")}
    assert load('{"version": 1, "excluded": {"7": [], "8": [1], "9": ["n1"], "10": 3}}') == {"9": ("n1",)}
    for text in ("", "[]", "{}", '{"version": 2, "excluded": {}}', "[" * 100_000):
        with pytest.raises(ValueError, match=r"."):
            node_choice.load(text)
