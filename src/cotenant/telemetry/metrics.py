"""Counters, gauges and histograms that may be created at import time and cost nothing until metrics are on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from cotenant.telemetry.attributes import Attribute

# The SDK's own bounds start at 5 s, which is useless for a plan that takes milliseconds; waits last for days.
SECONDS_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3_600.0, 4 * 3_600.0, 12 * 3_600.0, 86_400.0, 3 * 86_400.0),
)

_meter: Meter | None = None
_known: dict[str, InstrumentInfo] = {}


@dataclass(frozen=True, slots=True)
class InstrumentInfo:
    """The description of an instrument."""

    name: str
    kind: str  # counter, gauge or histogram
    unit: str
    description: str


class _Instrument:
    """An instrument that is created again whenever its meter changes."""

    __slots__ = ("_description", "_made", "_meter", "_name", "_unit")

    def __init__(self, name: str, unit: str, description: str) -> None:
        self._name, self._unit, self._description = name, unit, description
        self._meter: Meter | None = None
        self._made: Any = None
        _known[name] = InstrumentInfo(name, type(self).__name__.lower(), unit, description)

    def _get(self, meter: Meter, make: str, **more: Any) -> Any:
        if self._meter is not meter:
            self._made = getattr(meter, make)(self._name, self._unit, self._description, **more)
            self._meter = meter
        return self._made


class Counter(_Instrument):
    """A sum that only rises."""

    __slots__ = ()

    def add(self, amount: float = 1, **attributes: Attribute) -> None:
        """Add to the sum."""
        if _meter is not None:
            self._get(_meter, "create_counter").add(amount, attributes)


class Gauge(_Instrument):
    """A value that is replaced by the next one."""

    __slots__ = ()

    def set(self, value: float, **attributes: Attribute) -> None:
        """Set the current value."""
        if _meter is not None:
            self._get(_meter, "create_gauge").set(value, attributes)


class Histogram(_Instrument):
    """A distribution of times in seconds."""

    __slots__ = ()

    def record(self, value: float, **attributes: Attribute) -> None:
        """Record one value."""
        if _meter is not None:
            made = self._get(_meter, "create_histogram", explicit_bucket_boundaries_advisory=SECONDS_BOUNDS)
            made.record(value, attributes)


def counter(name: str, unit: str = "1", description: str = "") -> Counter:
    """Return a counter, for example `counter("cotenant.jobs.placed", "{job}")`."""
    return Counter(name, unit, description)


def gauge(name: str, unit: str = "1", description: str = "") -> Gauge:
    """Return a gauge."""
    return Gauge(name, unit, description)


def histogram(name: str, unit: str = "s", description: str = "") -> Histogram:
    """Return a histogram of times."""
    return Histogram(name, unit, description)


def known() -> list[InstrumentInfo]:
    """Return all instruments of the imported modules, by name."""
    return [_known[name] for name in sorted(_known)]


def install(meter: Meter | None) -> None:
    """Turn metrics on, or off with None. For `setup` and `shutdown`."""
    global _meter  # the switch that every instrument checks
    _meter = meter
