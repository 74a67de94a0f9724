"""The real pynvml over a stand-in for the driver's library, each time in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.node_agent.machines import two_sockets, write

from cotenant.node_agent.gpus import BadGpus, declared_gpus

SHOW = """
import json, pathlib, sys
from cotenant.node_agent.probe import ProbeWishes, probe
inventory, nvml = probe(ProbeWishes("node", shareable_gpus=True), sysfs=pathlib.Path(sys.argv[1]), allowed=range(16))
gpus = [[g.uuid, g.model, g.memory_bytes, g.numa_node, g.pci_bus_id, g.shareable, g.declared] for g in inventory.gpus]
used = nvml.utilisation_percent([gpu.uuid for gpu in inventory.gpus])
nvml.close()
told = {"gpus": gpus, "islands": [gpu.island for gpu in inventory.gpus]}
told |= {"cores": len(inventory.cores), "not_enforced": list(inventory.not_enforced), "used": used}
print("TOLD" + json.dumps(told))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    directory = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    target = directory / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return directory


def show(sysfs: Path, library: Path, trouble: str = "") -> dict[str, Any]:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": trouble}
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(sysfs)], env=environment, capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.partition("TOLD")[2])
    assert isinstance(told, dict)
    return told


def test_gpus_are_told_in_the_order_of_the_bus_with_their_numa_nodes(library: Path, tmp_path: Path) -> None:
    gpus = show(two_sockets(tmp_path), library)["gpus"]
    assert [gpu[3] for gpu in gpus] == [0, 0, 1, 1]
    assert gpus[0] == [
        "GPU-00000000-0000-0000-0000-000000000000",
        "V100-SXM2-32GB",
        80 << 30,
        0,
        "00000000:10:00.0",
        True,
        False,
    ]
    assert gpus[3][1] == "A100-SXM4-80GB"


def test_the_kernel_knows_the_numa_node_of_a_bus_better(library: Path, tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    write(root / "bus/pci/devices/0000:10:00.0/numa_node", "1")
    write(root / "bus/pci/devices/0000:20:00.0/numa_node", "-1")
    assert [gpu[3] for gpu in show(root, library)["gpus"]] == [1, 0, 1, 1]


@pytest.mark.parametrize(("links", "islands"), [("", [1, 1, 2, 2]), ("bridge", [1, 1, 0, 1]), ("lost", [0, 1, 1])])
def test_gpus_with_nvlink_between_them_are_an_island(
    library: Path, tmp_path: Path, links: str, islands: list[int]
) -> None:
    assert show(two_sockets(tmp_path), library, links)["islands"] == islands


def test_utilisation_is_the_mean(library: Path, tmp_path: Path) -> None:
    assert show(two_sockets(tmp_path), library)["used"] == 25.0


def test_a_driver_in_trouble_leaves_a_node_without_gpus_that_says_why(library: Path, tmp_path: Path) -> None:
    told = show(two_sockets(tmp_path), library, "init")
    assert (told["gpus"], told["cores"], told["used"]) == ([], 8, -1)
    assert told["not_enforced"] == ["GPUs are not used: NVML failed: Driver Not Loaded"]


def test_a_lost_gpu_does_not_take_the_others_along(library: Path, tmp_path: Path) -> None:
    told = show(two_sockets(tmp_path), library, "lost")
    assert len(told["gpus"]) == 3
    assert told["not_enforced"] == ["GPU 2 is not used: NVML failed: GPU is lost"]


def test_no_driver_is_no_trouble(tmp_path: Path) -> None:
    told = show(two_sockets(tmp_path), tmp_path)
    assert (told["gpus"], told["not_enforced"]) == ([], [])


@pytest.mark.parametrize("word", ["fake", "fake:", "fake:-1", "fake:99999", "gpu:2", ""])
def test_other_words_for_gpus_are_refused(word: str) -> None:
    with pytest.raises(BadGpus, match="auto"):
        declared_gpus("n", word, [0], shareable=False)
