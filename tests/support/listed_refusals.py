"""The slow twin of the refusals of equivalence classes."""

from __future__ import annotations

from collections.abc import Hashable

from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.scheduling.equivalence import ClassRefusals, Key


class ListedRefusals(ClassRefusals[Key]):
    """One list of all refusals, read from the first to the last, those by reservations last."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Key, Refusal, float, Hashable]] = []

    @property
    def any_reserved(self) -> bool:
        return True

    def add(self, key: Key, refusal: Refusal, fragmented_seconds: float, bound: Hashable = None) -> None:
        self.all.append((key, refusal, fragmented_seconds, bound if refusal.code is Code.RESERVED else None))

    def get(self, key: Key, fragmented_seconds: float, bound: Hashable = None) -> Refusal | None:
        for like, refusal, then, by in sorted(self.all, key=lambda one: one[1].code is Code.RESERVED):
            longer = fragmented_seconds - then
            fits = -refusal.held_seconds <= longer < refusal.holds_seconds
            if like == key and fits and (refusal.code is not Code.RESERVED or by == bound):
                return refusal.after(longer)
        return None
