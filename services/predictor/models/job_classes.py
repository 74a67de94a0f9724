"""Which kinds of jobs were seen and when last: all that something may be known of, also where no rate was told."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.job_class_memory import Key, Remembered
from cotenant.services.predictor.codec import Kind

KINDS_MAX = 10_000
FRESH_SECONDS = 60.0  # a sighting so soon after the last is not worth a record


@dataclass(slots=True)
class Sighting:
    """A kind of job as it was seen last; its name counts where it has no model."""

    model: str = ""
    name: str = ""
    seconds: float = -math.inf  # unix time


class Kinds:
    """Remembers kinds of jobs by user, model (else name), GPUs and replicas; dumped and restored as predictors are.

    >>> kinds = Kinds()
    >>> kinds.saw(("ann", "bert", "nightly", 1000, 1), 100.0)
    >>> kinds.find(user="ann"), kinds.find(model="vgg")
    (['ann/bert/1000/1'], [])
    """

    def __init__(self, kinds_max: int = KINDS_MAX) -> None:
        self._seen: Remembered[Sighting] = Remembered(kinds_max, Sighting, _write, _read)

    def saw(self, kind: Kind, seconds: float) -> None:
        """Note that a job of a kind was seen at a time."""
        user, model, name, gpu_milli, replicas = kind
        key = user, model or name, str(gpu_milli), str(replicas)
        known = self._seen.get(key)
        if known is None or seconds >= known.seconds + FRESH_SECONDS:
            sighting = self._seen.change(key)
            sighting.model, sighting.name, sighting.seconds = model, name, seconds

    def find(self, user: str = "", model: str = "") -> Sequence[str]:
        """Ids of kinds, sorted; of one user, or one model or name, where these are told."""
        return sorted(key_text for key_text, key in self._texts() if user in ("", key[0]) and model in ("", key[1]))

    def of(self, ids: Sequence[str]) -> Iterator[tuple[Kind, float]]:
        """The kinds with these ids, and when each was seen last."""
        keys = dict(self._texts())
        for one in ids:
            key = keys[one]
            sighting = self._seen.get(key)
            assert sighting is not None  # its key is there
            yield (key[0], sighting.model, sighting.name, int(key[2]), int(key[3])), sighting.seconds

    def _texts(self) -> Iterator[tuple[str, Key]]:
        return (("/".join(key), key) for key in self._seen.kinds())

    def dump(self) -> Mapping[str, bytes]:
        """Write down what changed since the last dump; a record without content was forgotten."""
        return self._seen.dump()

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read."""
        return self._seen.restore(records)


def _write(key: Key, sighting: Sighting) -> bytes:
    record = {"key": key, "model": sighting.model, "name": sighting.name, "seconds": sighting.seconds}
    return json.dumps(record, separators=(",", ":")).encode()


def _read(content: bytes) -> tuple[Key, Sighting]:
    """Read a kind back.

    Raises:
        ValueError: it is none; also TypeError and KeyError.
    """
    record = json.loads(content)
    seconds = kept.between(record["seconds"], 0, kept.UNIX_SECONDS_MAX)
    return kept.kind(record["key"]), Sighting(kept.text(record["model"]), kept.text(record["name"]), seconds)
