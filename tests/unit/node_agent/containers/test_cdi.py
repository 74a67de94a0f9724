"""Specs of the Container Device Interface: what is read, which device a GPU has, and whose fault a bad file is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from cotenant.node_agent.containers.cdi import BadCdiSpec, read_spec
from cotenant.node_agent.containers.container_gpus import ContainerGpus, NoDevice
from cotenant.v1 import resources_pb2

# As `nvidia-ctk cdi generate` writes it, shortened; its numbers differ from those of the device files.
NVIDIA = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia1, major: 195, minor: 1, type: c}]
- name: "1"
  containerEdits:
    deviceNodes: [{path: /dev/nvidia0, major: 195, minor: 0, type: c}]
- name: all
  containerEdits:
    deviceNodes:
    - {path: /dev/nvidia0, major: 195, minor: 0, type: c}
    - {path: /dev/nvidia1, major: 195, minor: 1, type: c}
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  deviceNodes: [{path: /dev/nvidiactl, major: 195, minor: 255, type: c}]
  mounts: [{hostPath: /lib/libcuda.so.1, containerPath: /lib/libcuda.so.1, options: [ro, nosuid, bind]}]
  hooks:
  - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, update-ldcache]}
"""


def gpus(place: Path, minors: Mapping[str, int], *, declared: bool = False) -> ContainerGpus:
    found = [resources_pb2.Gpu(uuid=uuid, declared=declared) for uuid in minors]
    return ContainerGpus(resources_pb2.Inventory(gpus=found), lambda: minors, (place,), os.getuid())


def write(place: Path, text: str, name: str = "nvidia.yaml") -> Path:
    path = place / name
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_a_gpu_has_the_device_of_its_own_file_and_no_other(tmp_path: Path) -> None:
    write(tmp_path, NVIDIA)
    edits = gpus(tmp_path, {"GPU-a": 0, "GPU-b": 1}).edits(["GPU-a"])
    assert [(one.path, one.major, one.minor) for one in edits.devices] == [
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia0", 195, 0),
    ]
    assert [one.target for one in edits.mounts] == ["/lib/libcuda.so.1"]
    assert edits.hooks[0].arguments == ("nvidia-cdi-hook", "update-ldcache")
    both = gpus(tmp_path, {"GPU-a": 0, "GPU-b": 1}).edits(["GPU-a", "GPU-b"])
    assert [one.path for one in both.devices] == ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1"]
    assert len(both.hooks) == 1


def test_a_device_with_the_name_of_the_uuid_comes_first(tmp_path: Path) -> None:
    named = NVIDIA.replace("name: all", "name: GPU-a")
    write(tmp_path, named)
    assert len(gpus(tmp_path, {"GPU-a": 0}).edits(["GPU-a"]).devices) == 3


def test_without_a_spec_the_reason_says_how_to_write_one(tmp_path: Path) -> None:
    found = gpus(tmp_path, {"GPU-a": 0})
    with pytest.raises(NoDevice, match=r"nvidia-ctk cdi generate --output=/etc/cdi/nvidia\.yaml"):
        found.edits(["GPU-a"])
    assert "containers have no GPUs on this node: no CDI spec in" in found.why_none()
    assert not found.edits([]).devices
    assert gpus(tmp_path, {"GPU-a": 0}, declared=True).why_none() == ""  # has no device file in any case
    write(tmp_path, NVIDIA)
    assert (
        "no CDI spec has a device of its own for the GPU GPU-c (/dev/nvidia7)"
        in gpus(tmp_path, {"GPU-c": 7}).why_none()
    )


def test_a_bad_file_is_named_and_hides_no_good_one(tmp_path: Path) -> None:
    write(tmp_path, "kind: [", "bad.yaml")
    found = gpus(tmp_path, {"GPU-a": 0})
    assert found.why_none().startswith(f"the CDI spec {tmp_path}/bad.yaml cannot be used: line ")
    write(tmp_path, NVIDIA)
    assert found.why_none() == ""


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    write(tmp_path, NVIDIA).chmod(0o666)
    assert "others than root may write it" in gpus(tmp_path, {"GPU-a": 0}).why_none()


def test_a_missing_device_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, NVIDIA.replace("{path: /dev/nvidia0, major: 195, minor: 0, type: c}", "{path: /dev/nvidia0}"))
    if not Path("/dev/nvidia0").exists():
        assert "the device /dev/nvidia0 of its CDI spec is missing" in gpus(tmp_path, {"GPU-a": 0}).why_none()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file must be a mapping"),
        ("a: 1", "the file has no cdiVersion"),
        ("cdiVersion: 2.0.0\nkind: a/b", "its cdiVersion must be"),
        ("cdiVersion: 0.6.0\nkind: gpu", "its kind must be like nvidia.com/gpu"),
        ("cdiVersion: 0.6.0\nkind: a/b", "it has no devices"),
        ("cdiVersion: 0.6.0\nkind: a/b\ndevices: [{name: x}, {name: x}]", "there is another device x"),
        ("cdiVersion: 0.6.0\nkind: a/b\ndevices: [{name: '/'}]", "devices[0].name must be letters"),
        (
            "cdiVersion: 0.6.0\nkind: a/b\ndevices: [{name: x, containerEdits: {deviceNodes: [{path: dev}]}}]",
            "path of devices[0].containerEdits.deviceNodes[0] must be an absolute path",
        ),
        (
            "cdiVersion: 0.6.0\nkind: a/b\ndevices: [{name: x, containerEdits: {hooks: [{hookName: x, path: /x}]}}]",
            "hookName must be one of",
        ),
        ("cdiVersion: 0.6.0\nkind: a/b\ndevices: [{name: x, containerEdits: {env: [A]}}]", "NAME=VALUE, not 'A'"),
        ("[" * 3000, "nested deeper"),
        ("{" * 100_000, "it is neither JSON nor YAML"),
        ("kind: \x00", "it is neither JSON nor YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(text: str, said: str) -> None:
    with pytest.raises(BadCdiSpec) as raised:
        read_spec(text.encode())
    assert said in str(raised.value) or "nested deeper" in str(raised.value)
