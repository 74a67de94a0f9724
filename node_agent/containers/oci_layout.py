"""Reads the JSON documents of an OCI image: pure functions of untrusted bytes.

An image layout's index names manifests by tag, or further indexes by architecture; a manifest names the image's
configuration and its layers. Each is named by its digest and size, which its reader checks first.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cotenant.node_agent.containers.container_config import ImageConfig

DOCUMENT_BYTES_MAX = 4 << 20
LAYERS_MAX = 512
DESCRIPTORS_MAX = 4096
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
TAG = "org.opencontainers.image.ref.name"
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
COMPRESSIONS = {"tar": "", "tar+gzip": "gzip", "tar.gzip": "gzip", "tar+zstd": "zstd"}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # by `uname -m`; others have the same name in both


class BadImage(Exception):
    """An image that cannot be used, for this reason."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob of an image: its SHA-256 in hexadecimal, its size and its kind."""

    digest: str
    size_bytes: int
    media_type: str = ""
    tag: str = ""
    architecture: str = ""

    @property
    def compression(self) -> str:
        """How a layer is compressed. Raises `BadImage`."""
        for ending, name in COMPRESSIONS.items():
            if self.media_type.endswith(ending):
                return name
        raise BadImage(f"layer {self.digest[:12]} has the unknown media type {self.media_type[:80]!r}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image: its configuration, and its layers from the lowest."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def check_blob(data: bytes, blob: Descriptor) -> bytes:
    """Return a blob's content. Raises `BadImage` if it is damaged."""
    if len(data) != blob.size_bytes or hashlib.sha256(data).hexdigest() != blob.digest:
        raise BadImage(f"blob {blob.digest[:12]} is damaged: its content has another digest or size")
    return data


def read_index(data: bytes) -> tuple[Descriptor, ...]:
    """Return what an index names. Raises `BadImage`."""
    listed = _list(_document(data, "index"), "manifests", DESCRIPTORS_MAX)
    return tuple(_descriptor(each, "index") for each in listed)


def choose(found: Sequence[Descriptor], tag: str, architecture: str) -> Descriptor:
    """Return the descriptor with a tag, or the only one without; of several architectures, this one's.

    Raises:
        BadImage: there is none, or it is not clear which.
    """
    tagged = [each for each in found if each.tag == tag] if tag else list(found)
    if not tagged:
        known = ", ".join(sorted({each.tag for each in found if each.tag})[:5])
        raise BadImage(f"the layout has no image {tag!r}" + (f"; it has {known}" if known else ""))
    fitting = [each for each in tagged if each.architecture in ("", architecture)]
    if not fitting:
        built = ", ".join(sorted({each.architecture for each in tagged}))
        raise BadImage(f"the image is for {built}, and this node is {architecture}")
    if len({each.digest for each in fitting}) > 1:
        raise BadImage(f"the layout has {len(fitting)} images: name one as oci:DIR:TAG")
    return fitting[0]


def read_manifest(data: bytes) -> Manifest:
    """Return an image's parts. Raises `BadImage`."""
    document = _document(data, "manifest")
    layers = _list(document, "layers", LAYERS_MAX)
    return Manifest(
        _descriptor(document.get("config"), "manifest"), tuple(_descriptor(each, "manifest") for each in layers)
    )


def read_config(data: bytes, architecture: str) -> ImageConfig:
    """Return what an image says about its program. Raises `BadImage`, also if it is for other machines."""
    document = _document(data, "configuration")
    built, system = document.get("architecture") or architecture, document.get("os") or "linux"
    if (built, system) != (architecture, "linux"):
        raise BadImage(f"the image is for {system} on {built}, and this node is linux on {architecture}")
    inner = document.get("config")
    config = inner if isinstance(inner, dict) else {}
    command = [*_texts(config, "Entrypoint"), *_texts(config, "Cmd")]
    return ImageConfig(dict(_variables(_texts(config, "Env"))), tuple(command))


def _variables(pairs: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals or "\0" in pair:
            raise BadImage(f"its configuration has an invalid variable: {pair[:64]!r}")
        yield name, value


def _texts(config: Mapping[str, Any], name: str) -> list[str]:
    found = config.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) and "\0" not in each for each in found):
        raise BadImage(f"{name} of its configuration is not a list of texts")
    return found


def _document(data: bytes, name: str) -> dict[str, Any]:
    if len(data) > DOCUMENT_BYTES_MAX:
        raise BadImage(f"its {name} has {len(data)} bytes; {DOCUMENT_BYTES_MAX} are allowed at most")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadImage(f"its {name} is not JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise BadImage(f"its {name} is not a JSON object")
    return found


def _list(document: Mapping[str, Any], name: str, most: int) -> list[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        raise BadImage(f"it has no list of {name}")
    if len(found) > most:
        raise BadImage(f"it has {len(found)} {name}; {most} are allowed at most")
    return found


def _descriptor(value: Any, name: str) -> Descriptor:
    entry = value if isinstance(value, dict) else {}
    digest, size = DIGEST.fullmatch(str(entry.get("digest"))), entry.get("size")
    if not digest or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise BadImage(f"its {name} has an entry without a SHA-256 digest and a size")
    notes, platform = entry.get("annotations"), entry.get("platform")
    return Descriptor(
        digest[1],
        size,
        str(entry.get("mediaType") or ""),
        str(notes.get(TAG) or "") if isinstance(notes, dict) else "",
        str(platform.get("architecture") or "") if isinstance(platform, dict) else "",
    )
