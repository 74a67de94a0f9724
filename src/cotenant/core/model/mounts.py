"""Mounts: files and directories of a node that a job's container sees beside its image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.model.field_limits import shown
from cotenant.core.model.limits import MOUNTS_MAX, PATH_LENGTH_MAX

_FORM = "HOST[:CONTAINER][:ro]"
_OF_THE_RUNTIME = ("/dev", "/proc", "/sys")  # a container's own


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or directory of the node, which the container sees at `target`.

    >>> str(Mount("/data", "/data", True)), str(Mount("/scratch/ada", "/work"))
    ('/data:/data:ro', '/scratch/ada:/work')
    """

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


def parse_mount(text: str) -> Mount:
    """Return the mount that a text describes; without a path in the container it is the one on the node.

    >>> parse_mount("/data:/mnt:ro"), parse_mount("/data:ro")
    (Mount(source='/data', target='/mnt', read_only=True), Mount(source='/data', target='/data', read_only=True))

    Raises:
        ValueError: it describes none.
    """
    parts = text.split(":")
    options = parts.pop() if len(parts) > 1 and not parts[-1].startswith("/") else "rw"
    if not 1 <= len(parts) <= 2 or options not in ("ro", "rw"):
        raise ValueError(f"must be {_FORM}, not {shown(text)}")
    mount = Mount(parts[0], parts[-1], options == "ro")
    for _, wrong in _path_errors(mount):
        raise ValueError(wrong)
    return mount


def _path_errors(mount: Mount) -> Iterator[tuple[str, str]]:
    for name, where, path in (("source", "on the node", mount.source), ("target", "in the container", mount.target)):
        if not path.startswith("/"):
            yield name, f"must have an absolute path {where}, not {shown(path)}"
        elif "\0" in path or ":" in path or ".." in path.split("/"):
            yield name, f"must have a path {where} without '..', colons and NUL bytes, not {shown(path)}"
        elif len(path) > PATH_LENGTH_MAX:
            yield name, f"has a path of {len(path)} characters; {PATH_LENGTH_MAX} are allowed at most"
    target = mount.target.rstrip("/")
    if not target or any(target == own or target.startswith(f"{own}/") for own in _OF_THE_RUNTIME):
        yield "target", f"cannot be mounted at {shown(mount.target)}: /, /dev, /proc and /sys are the container's own"


def mount_errors(mounts: Sequence[Mount], image: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the mounts of a job, by field."""
    if len(mounts) > MOUNTS_MAX:
        yield "container.mounts", f"at most {MOUNTS_MAX} are allowed, not {len(mounts)}"
    if mounts and not image:
        yield (
            "container.mounts",
            "need an image: a job without one sees the node's files at their own paths",
        )
    seen: set[str] = set()
    for index, mount in enumerate(mounts[:MOUNTS_MAX]):
        for name, wrong in _path_errors(mount):
            yield f"container.mounts[{index}].{name}", wrong
        target = mount.target.rstrip("/")
        if target in seen:
            yield f"container.mounts[{index}].target", f"{shown(mount.target)} is the target of another mount"
        seen.add(target)
