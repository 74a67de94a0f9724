"""Images for tests, made from a static busybox: a root file system, and what can run it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cotenant.node_agent.containers.container_runtime import find_runtime
from cotenant.node_agent.containers.oci_layout import ARCHITECTURES

APPLETS = ("cat", "chmod", "env", "grep", "id", "kill", "ls", "mkdir", "pwd", "sed", "sh", "sleep", "touch", "wc")


def need_containers() -> None:
    """Skip the test, with the reason, if no container can be run here."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if find_runtime() is None:
        pytest.skip("needs crun: apt-get install crun")
    static_busybox()


def static_busybox() -> Path:
    """Return a busybox that needs no library; skip the test if there is none."""
    found = shutil.which("busybox")
    if found is None:
        pytest.skip("needs a busybox: apt-get install busybox-static")
    linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=False)
    if linked.returncode == 0 and "statically" not in linked.stdout:
        pytest.skip("needs a static busybox: apt-get install busybox-static")
    return Path(found)


def make_root(path: Path) -> Path:
    """Make a root file system with a shell and a few commands."""
    (path / "bin").mkdir(parents=True)
    path.chmod(0o755)
    shutil.copy(static_busybox(), path / "bin/busybox")
    for name in APPLETS:
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc").mkdir()
    (path / "etc/issue").write_text("made for a test\n")
    return path


@dataclass(frozen=True)
class Entry:
    """An entry of a layer; without content and link it is a directory."""

    name: str
    content: bytes | None = None
    link: str = ""
    hard: bool = False
    mode: int = 0o755


def layer_of(entries: Iterable[Entry]) -> bytes:
    """Return a layer as an uncompressed archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.mode, info.mtime = entry.mode, 1_700_000_000
            info.type, info.linkname = tarfile.REGTYPE, entry.link
            if entry.link:
                info.type = tarfile.LNKTYPE if entry.hard else tarfile.SYMTYPE
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
            info.size = len(entry.content or b"")
            archive.addfile(info, io.BytesIO(entry.content or b""))
    return buffer.getvalue()


def layer_of_directory(root: Path) -> bytes:
    """Return a layer with everything in a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(root, ".")
    return buffer.getvalue()


def write_layout(
    path: Path,
    layers: Iterable[bytes],
    *,
    tag: str = "v1",
    architecture: str = "",
    config: Mapping[str, object] | None = None,
    compression: str = "gzip",
) -> Path:
    """Write an OCI image layout with one image; return its directory."""
    (path / "blobs/sha256").mkdir(parents=True, exist_ok=True)

    def blob(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (path / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": f"sha256:{digest}", "size": len(data)}

    def document(value: object, media_type: str) -> dict[str, object]:
        return blob(json.dumps(value).encode(), media_type)

    kinds = {"": "layer.v1.tar", "gzip": "layer.v1.tar+gzip", "zstd": "layer.v1.tar+zstd"}
    written = [blob(compress(layer, compression), kinds[compression]) for layer in layers]
    machine = platform.machine()
    built = architecture or ARCHITECTURES.get(machine, machine)
    described = document({"architecture": built, "os": "linux", "config": config or {}}, "config.v1+json")
    manifest = document({"schemaVersion": 2, "config": described, "layers": written}, "manifest.v1+json")
    manifest["annotations"] = {"org.opencontainers.image.ref.name": tag}
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    index = path / "index.json"
    others = json.loads(index.read_text())["manifests"] if index.exists() else []
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*others, manifest]}))
    return path


def compress(data: bytes, compression: str) -> bytes:
    """Return compressed data."""
    if compression == "zstd":
        return subprocess.run(["zstd", "-qc"], input=data, stdout=subprocess.PIPE, check=True).stdout
    return gzip.compress(data, mtime=0) if compression == "gzip" else data
