"""Job classes that have been observed, with the time of the last observation, even if no rate was reported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.job_class_memory import JobClassMemory, Key
from cotenant.services.predictor.codec import JobClass

KINDS_MAX = 10_000
FRESH_SECONDS = 60.0  # an observation this soon after the last is not saved


@dataclass(slots=True)
class Sighting:
    """The last observation of a job class; its name matters if it has no model."""

    model: str = ""
    name: str = ""
    seconds: float = -math.inf  # unix time


class JobClasses:
    """Job classes by user, model (else name), GPUs and replicas; dumped and restored like predictors.

    >>> kinds = JobClasses()
    >>> kinds.record(("ann", "bert", "nightly", 1000, 1), 100.0)
    >>> kinds.find(user="ann"), kinds.find(model="vgg")
    (['ann/bert/1000/1'], [])
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._seen: JobClassMemory[Sighting] = JobClassMemory(kinds_max, Sighting, _write, _read)

    def record(self, kind: JobClass, seconds: float) -> None:
        """Record that a job of a class was observed at a time."""
        user, model, name, gpu_milli, replicas = kind
        key = user, model or name, str(gpu_milli), str(replicas)
        known = self._seen.get(key)
        if known is None or seconds >= known.seconds + FRESH_SECONDS:
            sighting = self._seen.change(key)
            sighting.model, sighting.name, sighting.seconds = model, name, seconds

    def find(self, user: str = "", model: str = "") -> Sequence[str]:
        """Return the sorted ids of classes, optionally of one user, or of one model or name."""
        return sorted(key_text for key_text, key in self._texts() if user in ("", key[0]) and model in ("", key[1]))

    def of(self, ids: Sequence[str]) -> Iterator[tuple[JobClass, float]]:
        """Yield the classes with these ids, and when each was last observed."""
        keys = dict(self._texts())
        for one in ids:
            key = keys[one]
            sighting = self._seen.get(key)
            assert sighting is not None
            yield (key[0], sighting.model, sighting.name, int(key[2]), int(key[3])), sighting.seconds

    def _texts(self) -> Iterator[tuple[str, Key]]:
        return (("/".join(key), key) for key in self._seen.kinds())

    def dump(self) -> Mapping[str, bytes]:
        """Return the records that changed since the last dump; an empty one was dropped."""
        return self._seen.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; return the keys of unreadable ones."""
        return self._seen.restore(records)


def _write(key: Key, sighting: Sighting) -> bytes:
    record = {"key": key, "model": sighting.model, "name": sighting.name, "seconds": sighting.seconds}
    return json.dumps(record, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Sighting]:
    """Decode a record.

    Raises:
        ValueError, TypeError, KeyError: the record is invalid.
    """
    record = json.loads(content)
    seconds = kept.between(record["seconds"], 0, kept.UNIX_SECONDS_MAX)
    return kept.kind(record["key"]), Sighting(kept.text(record["model"]), kept.text(record["name"]), seconds)
