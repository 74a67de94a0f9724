"""What a predictor remembers about each job class: bounded, and persisted record by record as it changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from cotenant.core.model.estimate import Observation, Query

T = TypeVar("T")
Key = tuple[str, ...]

BAD_RECORD = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)  # anything that a bad record may raise


def job_class_of(about: Observation | Query) -> Key:
    """Return the class of a job: jobs with the same user, model (else name), GPUs and replicas are similar."""
    return about.user, about.model or about.name, str(about.gpu_milli), str(about.replicas)


class JobClassMemory(Generic[T]):
    """One value per job class. The class unused for longest is forgotten, with its record.

    `write` makes a record of a class and its value; `read` restores both, and raises if it cannot.
    """

    def __init__(
        self,
        kinds_max: int,
        new: Callable[[], T],
        write: Callable[[Key, T], bytes],
        read: Callable[[bytes], tuple[Key, T]],
    ) -> None:
        self._kinds_max, self._new, self._write, self._read = kinds_max, new, write, read
        self._kinds: OrderedDict[Key, T] = OrderedDict()
        self._changed: dict[Key, None] = {}
        self._by_model: dict[str, list[Key]] | None = None  # rebuilt after classes were added or removed

    def of_model(self, model: str) -> Sequence[tuple[Key, T]]:
        """Return all classes of this model, without marking them as used."""
        if self._by_model is None:
            self._by_model = {}
            for key in self._kinds:
                self._by_model.setdefault(key[1], []).append(key)
        return [(key, self._kinds[key]) for key in self._by_model.get(model, ())]

    def kinds(self) -> Sequence[Key]:
        """Return all classes, the one unused for longest first."""
        return list(self._kinds)

    def get(self, key: Key) -> T | None:
        """Return the value of a class, which then counts as used; None if it is unknown."""
        if key in self._kinds:
            self._kinds.move_to_end(key)
        return self._kinds.get(key)

    def change(self, key: Key) -> T:
        """Return the value of a class, created if necessary, to be changed."""
        if key not in self._kinds:
            self._put(key, self._new())
        self._kinds.move_to_end(key)
        self._changed[key] = None
        return self._kinds[key]

    def forget(self, key: Key) -> None:
        """Forget a class and its record."""
        if self._kinds.pop(key, None) is not None:
            self._changed[key] = None
            self._by_model = None

    def dump(self) -> Mapping[str, bytes]:
        """Return the records that changed since the last dump; an empty record was forgotten."""
        changed, self._changed = self._changed, {}
        return {
            "/".join(quote(part, safe="") for part in key): self._write(key, self._kinds[key])
            if key in self._kinds
            else b""
            for key in changed
        }

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; returns those that could not be read. An empty record is forgotten."""
        unread = []
        for name, content in records.items():
            if not content:
                if self._kinds.pop(tuple(unquote(part) for part in name.split("/")), None) is not None:
                    self._by_model = None
                continue
            try:
                key, thing = self._read(content)
            except BAD_RECORD:
                unread.append(name)
            else:
                self._put(key, thing)
        return unread

    def _put(self, key: Key, thing: T) -> None:
        self._kinds[key] = thing
        self._kinds.move_to_end(key)
        self._by_model = None
        while len(self._kinds) > self._kinds_max:
            forgotten, _ = self._kinds.popitem(last=False)
            self._changed[forgotten] = None
