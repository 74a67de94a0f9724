"""The images of a node: where jobs find them, and the cache of unpacked ones.

An image of an OCI layout is unpacked once, by a program of its own, into a directory that its digest names; all its
jobs mount that directory below a layer of their own. The least recently used images beyond the cache's size are removed
when a job has brought another one, but none that an attempt on this node uses.
"""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from cotenant.core.model.image_reference import ImageKind, ImageReference, parse_reference
from cotenant.node_agent.containers.container_config import Image, ImageConfig
from cotenant.node_agent.containers.oci_layout import BadImage
from cotenant.node_agent.containers.unpack import CONFIG, NEW, ROOT, SIZE

log = structlog.get_logger()

CACHE = "images"  # below the agent's state directory
PROGRAM = (sys.executable, "-I", "-m", "cotenant.node_agent.containers.unpack")


class ImageStore:
    """The cache of unpacked images. `in_use` returns the digests of images that attempts use."""

    def __init__(self, directory: Path, bytes_max: int, in_use: Callable[[], Iterable[str]]) -> None:
        self.directory, self._bytes_max, self._in_use = directory, bytes_max, in_use
        self._one_at_a_time = asyncio.Lock()

    def open(self) -> None:
        """Make the directory, and remove what an agent that was killed has left. Raises `OSError`."""
        self.directory.mkdir(mode=0o711, exist_ok=True)
        for left in self.directory.glob(f"{NEW}*"):
            shutil.rmtree(left, ignore_errors=True)

    async def prepare(
        self, text: str, user: Mapping[str, object] | None, stopped: asyncio.Event, show: Callable[[int, int], None]
    ) -> Image | None:
        """Return the image that a reference names, unpacked; None if the attempt was stopped meanwhile.

        `user` has the rights to read it; None: the agent's own user. `show` gets the bytes read, and those to read.

        Raises:
            BadImage: there is no such image, or it cannot be used here.
            OSError: the disk refuses.
        """
        reference = parse_reference(text)
        if reference.kind is ImageKind.DIRECTORY:
            return Image(reference.path, of_user=True)
        async with self._one_at_a_time:
            if stopped.is_set():
                return None
            digest = await self._unpack(reference, user, stopped, show)
            if digest is None:
                return None
            image = await asyncio.to_thread(self._read, digest)
            await asyncio.to_thread(self.shrink, digest)
        return image

    async def _unpack(
        self,
        reference: ImageReference,
        user: Mapping[str, object] | None,
        stopped: asyncio.Event,
        show: Callable[[int, int], None],
    ) -> str | None:
        request = {
            "path": reference.path,
            "tag": reference.tag,
            "user": user,
            "cache": str(self.directory),
            "bytes_max": self._bytes_max,
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*PROGRAM, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
        reading = asyncio.create_task(_read_answer(process, show))
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return None
            return _digest_of(reading.result())
        finally:
            for task in (reading, stopping):
                task.cancel()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _read(self, digest: str) -> Image:
        found = json.loads((self.directory / digest / CONFIG).read_text())
        config = ImageConfig(found["environment"], tuple(found["command"]))
        return Image(str(self.directory / digest / ROOT), config=config, digest=digest)

    def shrink(self, keep: str = "") -> None:
        """Remove the least recently used images beyond the cache's size. Blocks."""
        known = []
        for place in self.directory.iterdir():
            with suppress(OSError, ValueError):
                known.append((place.stat().st_mtime, int((place / SIZE).read_text()), place))
        over = sum(size for _, size, _ in known) - self._bytes_max
        kept = {keep, *self._in_use()}
        for _, size, place in sorted(known):
            if over <= 0:
                return
            if place.name not in kept:
                log.info("image_removed", digest=place.name, bytes=size)
                left = place.with_name(f"{NEW}{place.name}")
                with suppress(OSError):
                    place.rename(left)
                shutil.rmtree(left, ignore_errors=True)
                over -= size


async def _read_answer(process: asyncio.subprocess.Process, show: Callable[[int, int], None]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = {"error": "the program that unpacks images was killed", "errno": errno.ENOMEM}
    async for line in process.stdout:
        found = json.loads(line)
        if "done" in found:
            show(found["done"], found["total"])
    return found


def _digest_of(found: Mapping[str, Any]) -> str:
    if "error" not in found:
        return str(found["digest"])
    if found["errno"]:
        raise OSError(found["errno"], found["error"])
    raise BadImage(found["error"])
