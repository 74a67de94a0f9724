"""Measured rates of each job class by cores, from which profiles are planned."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cotenant.core.model.estimate import TRAINING, Observation
from cotenant.core.prediction import record_validation as kept
from cotenant.core.prediction.core_curve import Point
from cotenant.core.prediction.drift import BOUNDS, Bounds, Profile, Seen
from cotenant.services.predictor.codec import JobClass

KINDS_MAX = 10_000
SETTINGS_MAX = 16  # per class
UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError)  # raised by decoding a bad record


class Setting(NamedTuple):
    """What rates depend on besides the job class and its cores."""

    gpu_type: str
    phase: str = TRAINING
    nodes: int = 1


BySetting = dict[Setting, Profile[Observation]]


class ProfileStore:
    """The rates of each job class by setting and cores; the least recently used class is dropped.

    It is dumped and restored like a predictor.
    """

    def __init__(self, kinds_max: int = KINDS_MAX, bounds: Bounds = BOUNDS) -> None:
        self._kinds_max, self._bounds = kinds_max, bounds
        self._profiles: OrderedDict[str, BySetting] = OrderedDict()
        self._stale: set[str] = set()  # classes with a stale setting
        self._changed: set[str] = set()

    def record(self, kind: JobClass, observation: Observation, *, profiled: bool = False) -> Seen[Observation]:
        """Record the rate of a window; return what predictors learn from it. A window without cores is only learned.

        Raises:
            ValueError: a value is invalid; nothing is recorded.
        """
        held, rate = observation.allocation, observation.rate_per_second
        if held.cores < 1 or not rate:
            return Seen((observation,))
        key, setting = key_of(kind), Setting(held.gpu_type, observation.phase, held.nodes)
        by_setting = self._touch(key)
        if setting not in by_setting and len(by_setting) == SETTINGS_MAX:
            del by_setting[next(iter(by_setting))]
        profile = by_setting.setdefault(setting, Profile())
        self._changed.add(key)
        if profiled:
            return profile.measure(held.cores, rate, observation)
        seen = profile.add_window(held.cores, rate, observation, self._bounds)
        if profile.stale:
            self._stale.add(key)
        return seen

    def at(self, kind: JobClass, gpu_type: str) -> Sequence[Point]:
        """Return a class's training rates on one node with a GPU type, or with the type that has most rates."""
        profile = self._profile(kind, gpu_type, TRAINING)
        return profile.windows.points() if profile else []

    def settings(self, kind: JobClass) -> Mapping[Setting, Profile[Observation]]:
        """Return all measured rates of a job class."""
        return self._profiles.get(key_of(kind), {})

    def stale(self, kind: JobClass, gpu_type: str, phase: str = TRAINING) -> str:
        """Return why the rates of a class are stale; "" if they are not, or are unknown."""
        if not self._stale or key_of(kind) not in self._stale:
            return ""
        profile = self._profile(kind, gpu_type, phase)
        return profile.stale if profile else ""

    def mark_fresh(self, kind: JobClass, gpu_type: str) -> None:
        """Mark a class's rates as fresh after enough new measurements."""
        profile = self._profile(kind, gpu_type, TRAINING)
        if profile and profile.stale:
            profile.stale = ""
            self._note(key_of(kind))
            self._changed.add(key_of(kind))

    def _profile(self, kind: JobClass, gpu_type: str, phase: str) -> Profile[Observation] | None:
        known = self._profiles.get(key_of(kind), {})
        fitting = [one for one in known if one.phase == phase and one.nodes == 1 and gpu_type in ("", one.gpu_type)]
        return known[max(sorted(fitting), key=lambda one: len(known[one].windows))] if fitting else None

    def dump(self) -> Mapping[str, bytes]:
        """Return the records that changed since the last dump; an empty one was dropped."""
        changed, self._changed = self._changed, set()
        return {key: _write(self._profiles[key]) if key in self._profiles else b"" for key in sorted(changed)}

    def restore(self, records: Mapping[str, bytes]) -> Sequence[str]:
        """Restore dumped records; return the keys of unreadable ones."""
        unread = []
        for key, content in records.items():
            if not content and key in self._profiles:  # another replica dropped it
                del self._profiles[key]
                self._stale.discard(key)
                continue
            try:
                by_setting = _read(content)
            except UNREADABLE:
                unread.append(key)
            else:
                self._touch(key).update(by_setting)
                self._note(key)
        return unread

    def _note(self, key: str) -> None:
        if any(profile.stale for profile in self._profiles[key].values()):
            self._stale.add(key)
        else:
            self._stale.discard(key)

    def _touch(self, key: str) -> BySetting:
        seen = self._profiles.setdefault(key, {})
        self._profiles.move_to_end(key)
        while len(self._profiles) > self._kinds_max:
            forgotten, _ = self._profiles.popitem(last=False)
            self._changed.add(forgotten)
            self._stale.discard(forgotten)
        return seen


def key_of(kind: JobClass) -> str:
    """Return the record key of a job class."""
    user, model, name, gpu_milli, replicas = kind
    return f"{user}/{model or name}/{gpu_milli}/{replicas}"


def _write(by_setting: BySetting) -> bytes:
    profiles = [
        {
            "setting": setting,
            "stale": profile.stale,
            "rates": [
                [cores, *_reference(profile, cores), list(rates)] for cores, rates in profile.windows.rates.items()
            ],
        }
        for setting, profile in by_setting.items()
    ]
    return json.dumps({"profiles": profiles}, separators=(",", ":")).encode()


def _reference(profile: Profile[Observation], cores: int) -> tuple[float, int]:
    return profile.references.get(cores, (0.0, 0))


def _read(content: bytes) -> BySetting:
    match json.loads(content):
        case {"profiles": [*profiles]}:
            return dict(_profile(one) for one in profiles)
    raise ValueError("not a record of measured rates")


def _profile(record: Any) -> tuple[Setting, Profile[Observation]]:
    match record:
        case {"setting": [str(gpu_type), str(phase), int(nodes)], "stale": str(stale), "rates": [*rows]}:
            rates: dict[int, list[float]] = {}
            references = {}
            for cores, mean, count, seen in rows:
                rates[kept.cores(cores, 1)] = [kept.rate(rate) for rate in seen]
                if count:
                    references[kept.cores(cores, 1)] = kept.rate(mean), kept.whole(count, 1, kept.STEPS_MAX)
            setting = Setting(kept.text(gpu_type), kept.text(phase), kept.nodes(nodes))
            return setting, Profile(rates, references, kept.text(stale))
    raise ValueError("not a profile")
