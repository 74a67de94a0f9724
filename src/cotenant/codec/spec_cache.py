"""A least-recently-used cache of decoded job specs, bounded by the memory that they use.

A bound on the number of specs bounds nothing: 2 KiB on the wire become 300 bytes or 30 KiB of objects, and every job of
an array has a spec of its own. The size of a decoded spec is estimated from its parts; the estimate is checked against
`tracemalloc` in the tests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from cotenant.v1 import job_pb2

SPEC_BYTES_MAX = 2_048  # on the wire; larger specs are rare, and decoded each time
BYTES_MAX = 32 << 20  # 16,384 specs with half a kilobyte each

OBJECT_BYTES = 1_500  # a spec of one role, its key and its entry
PER_BYTE = 2.5  # of the wire: in the key and again as text
ROLE_BYTES = 300
PAIR_BYTES = 170  # a tuple and two strings
WORD_BYTES = 70

Decoded = TypeVar("Decoded")


class SpecCache(Generic[Decoded]):
    """What `decode` returned for specs; an error is not cached.

    >>> cache = SpecCache(lambda spec: spec.name.upper())
    >>> cache(job_pb2.JobSpec(name="a")), len(cache)
    ('A', 1)
    """

    def __init__(
        self,
        decode: Callable[[job_pb2.JobSpec], Decoded],
        *,
        bytes_max: int = BYTES_MAX,
        spec_bytes_max: int = SPEC_BYTES_MAX,
    ) -> None:
        self._decode, self._bytes_max, self._spec_bytes_max = decode, bytes_max, spec_bytes_max
        self._entries: OrderedDict[bytes, tuple[Decoded, int]] = OrderedDict()
        self.bytes = 0  # as estimated

    def __len__(self) -> int:
        """Return how many specs are cached."""
        return len(self._entries)

    def __call__(self, spec: job_pb2.JobSpec) -> Decoded:
        """Return the decoded spec, the same object for equal specs."""
        key = spec.SerializeToString()
        if (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            return entry[0]
        decoded = self._decode(spec)
        if len(key) <= self._spec_bytes_max:
            size = estimated_bytes(spec, len(key))
            self._entries[key] = decoded, size
            self.bytes += size
            while self.bytes > self._bytes_max:
                _, (_, freed) = self._entries.popitem(last=False)
                self.bytes -= freed
        return decoded

    def cache_clear(self) -> None:
        """Drop everything, as `functools.lru_cache` does."""
        self._entries.clear()
        self.bytes = 0


def estimated_bytes(spec: job_pb2.JobSpec, wire_bytes: int) -> int:
    """Return about how much memory a decoded spec and its key take."""
    pairs = (
        len(spec.environment) + len(spec.labels) + len(spec.dependencies) + len(spec.array.ranges) + len(spec.notify)
    )
    pairs += len(spec.submit_directory.environment) + 2 * len(spec.secrets) + 2 * len(spec.container.mounts)
    words = len(spec.command) + sum([len(role.command) for role in spec.roles])
    parts = ROLE_BYTES * len(spec.roles) + PAIR_BYTES * pairs + WORD_BYTES * words
    return OBJECT_BYTES + int(PER_BYTE * wire_bytes) + parts
