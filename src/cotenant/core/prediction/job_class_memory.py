"""What a predictor remembers of each kind of job: bounded, and written down record by record as it changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import quote, unquote

from cotenant.core.model.estimate import Observation, Query

T = TypeVar("T")
Key = tuple[str, ...]

BAD_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # whatever one may bring


def kind_of(about: Observation | Query) -> Key:
    """Say what kind of job this is: jobs are alike that share user, model (else name), GPUs and replicas."""
    return about.user, about.model or about.name, str(about.gpu_milli), str(about.replicas)


class Remembered(Generic[T]):
    """One thing for each kind of job. The kind unused for longest is forgotten, and its record with it.

    `write` makes a record of a kind and its thing; `read` takes both back, and raises where they cannot be.
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
        self._by_model: dict[str, list[Key]] | None = None  # made anew after kinds came or went

    def of_model(self, model: str) -> Sequence[tuple[Key, T]]:
        """All kinds whose second part is this model, without using them."""
        if self._by_model is None:
            self._by_model = {}
            for key in self._kinds:
                self._by_model.setdefault(key[1], []).append(key)
        return [(key, self._kinds[key]) for key in self._by_model.get(model, ())]

    def kinds(self) -> Sequence[Key]:
        """All kinds, the one unused for longest first."""
        return list(self._kinds)

    def get(self, key: Key) -> T | None:
        """What is known of a kind, which counts as used now."""
        if key in self._kinds:
            self._kinds.move_to_end(key)
        return self._kinds.get(key)

    def change(self, key: Key) -> T:
        """Find or begin a kind, to be changed."""
        if key not in self._kinds:
            self._put(key, self._new())
        self._kinds.move_to_end(key)
        self._changed[key] = None
        return self._kinds[key]

    def forget(self, key: Key) -> None:
        """Let a kind go, and its record with it."""
        if self._kinds.pop(key, None) is not None:
            self._changed[key] = None
            self._by_model = None

    def dump(self) -> Mapping[str, bytes]:
        """Write down what changed since the last dump; a record without content was forgotten."""
        changed, self._changed = self._changed, {}
        return {
            "/".join(quote(part, safe="") for part in key): self._write(key, self._kinds[key])
            if key in self._kinds
            else b""
            for key in changed
        }

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Take back what was dumped; names the records that could not be read. One without content is forgotten."""
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
