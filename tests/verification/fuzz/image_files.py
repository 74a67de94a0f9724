"""Fuzz targets: what users' images bring, the JSON documents of an OCI layout and the archives of its layers."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support.images import Entry, layer_of
from tests.verification.fuzz.targets import Prepared, Target

from cotenant.node_agent.containers.cdi import BadCdiSpec, read_spec
from cotenant.node_agent.containers.container_gpus import ContainerGpus, NoDevice
from cotenant.node_agent.containers.layers import Unpacker
from cotenant.node_agent.containers.oci_layout import BadImage, choose, read_config, read_index, read_manifest
from cotenant.v1 import resources_pb2

BLOB = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": f"sha256:{'0' * 64}", "size": 10}
NOTES = {"annotations": {"org.opencontainers.image.ref.name": "v1"}, "platform": {"architecture": "amd64"}}
INDEX = json.dumps({"schemaVersion": 2, "manifests": [{**BLOB, **NOTES}, BLOB]}).encode()
MANIFEST = json.dumps({"schemaVersion": 2, "config": BLOB, "layers": [BLOB, BLOB]}).encode()
CONFIG = json.dumps(
    {"architecture": "amd64", "os": "linux", "config": {"Env": ["A=b"], "Entrypoint": ["sh"], "Cmd": ["-c", "true"]}}
).encode()
CDI_YAML = b"""\
cdiVersion: 0.6.0
kind: nvidia.com/gpu
devices:
- name: GPU-1
  containerEdits:
    deviceNodes:
    - {path: /dev/nvidia0, hostPath: /dev/nvidia0, type: c, major: 195, minor: 0, fileMode: 0666}
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void]
  mounts:
  - {hostPath: /lib/libcuda.so.1, containerPath: /lib/libcuda.so.1, options: [ro, bind]}
  hooks:
  - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, update-ldcache], timeout: 5}
  additionalGids: [44]
"""
CDI_JSON = b'{"cdiVersion": "1.0.0", "kind": "a.b/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}]}'
LAYER = layer_of(
    [
        Entry("d/f", b"content"),
        Entry("l", link="d"),
        Entry("l/g", b"x"),
        Entry("h", link="d/f", hard=True),
        Entry("d/.wh.f", b""),
        Entry("d/.wh..wh..opq", b""),
    ]
)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("image index", lambda directory: Prepared(_index, (INDEX,)), (BadImage,))
    yield Target("image manifest", lambda directory: Prepared(_manifest, (MANIFEST,)), (BadImage,))
    yield Target("image configuration", lambda directory: Prepared(_config, (CONFIG,)), (BadImage,))
    yield Target("CDI spec", _cdi_files, (BadCdiSpec, NoDevice))
    yield Target("image layer", _layers, (BadImage, OSError))


def _index(data: bytes) -> None:
    choose(read_index(data), "v1", "amd64")


def _manifest(data: bytes) -> None:
    for layer in read_manifest(data).layers:
        assert layer.compression in ("", "gzip", "zstd")


def _config(data: bytes) -> None:
    found = read_config(data, "amd64")
    assert all("\0" not in word for word in (*found.command, *found.environment, *found.environment.values()))


def _cdi_files(directory: Path) -> Prepared:
    path = directory / "fuzzed.yaml"
    gpus = ContainerGpus(resources_pb2.Inventory(), lambda: {"GPU-1": 0}, (directory,), os.getuid())

    def run(data: bytes) -> None:
        """Read a spec, and look for a GPU in its file."""
        path.write_bytes(data)
        path.chmod(0o644)
        gpus.why_none()
        found = read_spec(data)
        for name in found.devices:
            edits = found.edits(name)
            assert all(one.path.startswith("/") for one in edits.devices)
            assert all("=" in word for word in edits.environment)
        gpus.edits(["GPU-1"])

    return Prepared(run, (CDI_YAML, CDI_JSON))


def _layers(directory: Path) -> Prepared:
    place, root = directory / "image", directory / "image/root"

    def run(data: bytes) -> None:
        """Unpack a layer; what is beside the image stays as it is."""
        shutil.rmtree(place, ignore_errors=True)
        root.mkdir(parents=True)
        unpacker = Unpacker(str(root), 1 << 20)
        try:
            unpacker.unpack(io.BytesIO(data))
        finally:
            unpacker.close()
            assert [path.name for path in place.iterdir()] == ["root"]

    return Prepared(run, (LAYER,), (b"../", b".wh.", b".wh..wh..opq", b"/"))
