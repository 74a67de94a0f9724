"""Clusters in short and in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotenant.core.nodes import NodeShape
from cotenant.simulator import BadCluster, parse_cluster


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "cores"),
    [("6x8", 6, 48, 144), ("2x8x96", 2, 16, 192), ("1X4", 1, 4, 12), ("3x0x64", 3, 0, 192), (" 2x8 ", 2, 16, 48)],
)
def test_a_cluster_in_short(text: str, nodes: int, gpus: int, cores: int) -> None:
    cluster = parse_cluster(text)
    assert (len(cluster.shapes), cluster.gpus, cluster.cores) == (nodes, gpus, cores)
    assert set(cluster.racks) == {""}


SAID = {
    "nodes": [
        {"count": 2, "gpus": 8, "cores": 96, "memory_bytes": 2**39, "gpu_type": "A100", "rack": "r1"},
        {"gpus": 4},
        {"cores": 64},
    ]
}
YAML = """
nodes:
  - {count: 2, gpus: 8, cores: 96, memory_bytes: 549755813888, gpu_type: A100, rack: r1}
  - gpus: 4
  - cores: 64
"""


@pytest.mark.parametrize("content", [json.dumps(SAID), json.dumps(SAID["nodes"]), YAML])
def test_a_file_says_everything(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cluster"
    file.write_text(content)
    cluster = parse_cluster(str(file))
    large = NodeShape(gpus=8, cores=96, memory_bytes=2**39, gpu_type="A100")
    assert cluster.shapes == (large, large, NodeShape(gpus=4, cores=12), NodeShape(gpus=0, cores=64))
    assert cluster.racks == ("r1", "r1", "", "")
    assert cluster.ledger().racks == cluster.racks


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("6y8", "cluster '6y8' is neither NxG[xC], such as 6x8 or 6x8x48, nor a file"),
        ("0x8", "0x8: count: expected a whole number from 1 to 100000, found '0'"),
        ("999999999x8", "999999999"),
        ("2x0", "expected GPUs or cores, found neither"),
    ],
)
def test_a_cluster_that_cannot_be_is_told_why(text: str, told: str) -> None:
    with pytest.raises(BadCluster) as failure:
        parse_cluster(text)
    assert told in str(failure.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "expected a list of nodes, alone or under 'nodes', found 'None'"),
        ("nodes: []", "expected a list of nodes, alone or under 'nodes', found '[]'"),
        ("nodes: 6", "expected a list of nodes, alone or under 'nodes', found '6'"),
        ("racks: 2", "'racks' is no key of a cluster; only 'nodes' is"),
        ("- 6x8", "nodes[0]: expected an object with count, gpus"),
        ("- {gpu: 8}", "nodes[0]: gpu: is no key of a node; did you mean gpus?"),
        ("- {gpus: 8}\n- {gpus: -1}", "nodes[1]: gpus: expected a whole number from 0 to 1000000, found '-1'"),
        ("- {gpus: '8'}", "nodes[0]: gpus: expected a whole number"),
        ("- {gpus: true}", "nodes[0]: gpus: expected a whole number"),
        ("- {gpus: 8, count: 0}", "nodes[0]: count: expected a whole number from 1 to 100000, found '0'"),
        ("- {gpus: 8, rack: 1}", "nodes[0]: rack: expected a text, found '1'"),
        ("- {gpus: [}", "is neither YAML nor JSON"),
    ],
)
def test_a_file_that_is_no_cluster_is_told_where(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    with pytest.raises(BadCluster) as failure:
        parse_cluster(str(file))
    assert str(file) in str(failure.value)
    assert told in str(failure.value)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadCluster, match="is no UTF-8 text"):
        parse_cluster(str(file))
