"""Clusters from shorthands and files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.core.model.node import NodeShape
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
SWITCHES = "num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n"


@pytest.mark.parametrize("content", [json.dumps(SAID), json.dumps(SAID["nodes"]), YAML])
def test_a_cluster_file_sets_every_property(tmp_path: Path, content: str) -> None:
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
        ("0x8", "0x8: count: expected an integer from 1 to 100000, found '0'"),
        ("999999999x8", "999999999"),
        ("2x0", "expected GPUs or cores, found neither"),
    ],
)
def test_an_invalid_cluster_is_rejected_with_a_reason(text: str, told: str) -> None:
    with pytest.raises(BadCluster) as failure:
        parse_cluster(text)
    assert told in str(failure.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "expected a list of nodes, alone or under 'nodes', found 'None'"),
        ("nodes: []", "expected a list of nodes, alone or under 'nodes', found '[]'"),
        ("nodes: 6", "expected a list of nodes, alone or under 'nodes', found '6'"),
        ("racks: 2", "unknown key 'racks'; the only key of a cluster is 'nodes'"),
        ("- 6x8", "nodes[0]: expected an object with count, gpus"),
        ("- {gpu: 8}", "nodes[0]: gpu: unknown key; did you mean gpus?"),
        ("- {gpus: 8}\n- {gpus: -1}", "line 2: nodes[1]: gpus: expected an integer from 0 to 1000000, found '-1'"),
        ("- {gpus: '8'}", "nodes[0]: gpus: expected an integer"),
        ("- {gpus: true}", "nodes[0]: gpus: expected an integer"),
        ("- {gpus: 8, count: 0}", "nodes[0]: count: expected an integer from 1 to 100000, found '0'"),
        ("- {gpus: 8, rack: 1}", "nodes[0]: rack: expected a string, found '1'"),
        ("- {gpus: [}", "is neither YAML nor JSON"),
        ("- {gpus: \x01}", "is neither YAML nor JSON"),
        ("- gpus: 8\n  cores: 9\n  gpus: 4", "line 3: nodes[0]: gpus: occurs twice"),
        ("- gpus: 8\n  shareable: 1", "line 2: nodes[0]: shareable: expected true or false, found '1'"),
        ("- {gpus: 8, numa_nodes: 0}", "numa_nodes: expected an integer from 1 to 1024, found '0'"),
        (
            "- gpus: 8\n\n  memory_bandwidth_bytes_per_second: fast",
            "line 3: nodes[0]: memory_bandwidth_bytes_per_second: expected a number of bytes/s from 0 to 1e+15",
        ),
        ("- {gpus: 8, memory_bandwidth_bytes_per_second: 1" + "0" * 400 + "}", "expected a number of bytes/s"),
        ("- {gpus: 8, memory_bandwidth_bytes_per_second: .nan}", "expected a number of bytes/s"),
        ("- {gpus: 8, rack: 2024-13-01}", "has an invalid value: month must be in 1..12"),
        ("- &a {gpus: *a}", "is neither YAML nor JSON"),
        ("[" * 5000, "is nested too deeply"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,x,1,0,", "line 2, column 'cpu_milli': expected an integer"),
        ("sn,cpu_milli,memory_mib,gpu,model\n\na,900,1,0,", "line 3, column 'cpu_milli': expected at least one"),
        ("sn,cpu_milli,memory_mib,gpu,model\na,1000,1,0", "line 2: expected 5 fields"),
        ("sn,cpu_milli,memory_mib,gpu,model\n", "has 0 nodes; expected 1 to 100000"),
        (SWITCHES.replace(",", '",', 1) + ",6,8,128,512", "expected a list of nodes"),
        (SWITCHES + "0,6,8,128,512", "line 2, column 'num_switch': expected an integer from 1 to"),
        (SWITCHES + "1,6,0,0,512", "line 2, column 'num_gpu_p_node': expected GPUs or cores, found '0'"),
    ],
)
def test_an_invalid_cluster_file_is_rejected_with_its_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    with pytest.raises(BadCluster) as failure:
        parse_cluster(str(file))
    assert str(file) in str(failure.value)
    assert told in str(failure.value)


def test_a_binary_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadCluster, match="is not UTF-8 text"):
        parse_cluster(str(file))


def test_bandwidth_memory_domains_and_sharing_are_per_node(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "- {count: 2, gpus: 8, numa_nodes: 2, memory_bandwidth_bytes_per_second: 380e9, shareable: true}\n"
        "- {cores: 64, memory_bandwidth_bytes_per_second: 200000000000}\n- gpus: 1\n"
    )
    cluster = parse_cluster(str(file))
    assert cluster.memory_bandwidths == (380e9, 380e9, 200e9, 0.0)
    assert cluster.numa_nodes == (2, 2, 1, 1)
    assert [shape.shareable for shape in cluster.shapes] == [True, True, False, False]


def test_defaults_of_a_cluster_shorthand() -> None:
    cluster = parse_cluster("2x8")
    assert (cluster.memory_bandwidths, cluster.numa_nodes, cluster.resources.memory_bytes) == ((0.0, 0.0), (1, 1), 0)


def test_openbs_list_of_nodes(tmp_path: Path) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,32500,262144,0,\nn1,96000,786432,8,V100M32\n")
    cluster = parse_cluster(str(file))
    assert cluster.shapes == (
        NodeShape(gpus=0, cores=32, memory_bytes=2**38),
        NodeShape(gpus=8, cores=96, memory_bytes=3 * 2**38, gpu_type="V100M32", shareable=True),
    )


def test_a_cluster_of_switches_has_them_for_racks(tmp_path: Path) -> None:
    file = tmp_path / "n8g8.csv"
    file.write_text(SWITCHES + "2,2,8,92,520")  # like Muri's, without a final newline
    cluster = parse_cluster(str(file))
    assert cluster.shapes == (NodeShape(gpus=8, cores=92, memory_bytes=520 * 10**9),) * 4
    assert cluster.racks == ("switch-0", "switch-0", "switch-1", "switch-1")


@given(st.text(max_size=80) | st.text("-{}[]:,&*!gpus cores8x\n\t\"'", max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_a_cluster_or_rejected_with_a_reason(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content, encoding="utf-8", errors="replace")
    with suppress(BadCluster):
        parse_cluster(str(file))
