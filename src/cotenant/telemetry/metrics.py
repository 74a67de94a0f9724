"""Counters, gauges and histograms that may be made at import time and cost nothing until metrics are on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

    from cotenant.telemetry.tracing import Attribute

_meter: Meter | None = None


class _Instrument:
    """An instrument that is made anew whenever the meter behind it changes."""

    __slots__ = ("_description", "_made", "_meter", "_name", "_unit")

    def __init__(self, name: str, unit: str, description: str) -> None:
        self._name, self._unit, self._description = name, unit, description
        self._meter: Meter | None = None
        self._made: Any = None

    def _get(self, meter: Meter, make: str) -> Any:
        if self._meter is not meter:
            self._made = getattr(meter, make)(self._name, self._unit, self._description)
            self._meter = meter
        return self._made


class Counter(_Instrument):
    """A sum that only grows."""

    __slots__ = ()

    def add(self, amount: float = 1, **attributes: Attribute) -> None:
        """Count something."""
        if _meter is not None:
            self._get(_meter, "create_counter").add(amount, attributes)


class Gauge(_Instrument):
    """A value of which the last one counts."""

    __slots__ = ()

    def set(self, value: float, **attributes: Attribute) -> None:
        """Tell the value as it is now."""
        if _meter is not None:
            self._get(_meter, "create_gauge").set(value, attributes)


class Histogram(_Instrument):
    """A distribution."""

    __slots__ = ()

    def record(self, value: float, **attributes: Attribute) -> None:
        """Tell one value."""
        if _meter is not None:
            self._get(_meter, "create_histogram").record(value, attributes)


def counter(name: str, unit: str = "1", description: str = "") -> Counter:
    """Make a counter, for example `counter("cotenant.jobs.placed", "{job}")`."""
    return Counter(name, unit, description)


def gauge(name: str, unit: str = "1", description: str = "") -> Gauge:
    """Make a gauge."""
    return Gauge(name, unit, description)


def histogram(name: str, unit: str = "s", description: str = "") -> Histogram:
    """Make a histogram."""
    return Histogram(name, unit, description)


def install(meter: Meter | None) -> None:
    """Turn metrics on, or off with None. For `setup` and `shutdown`."""
    global _meter  # the one switch that every instrument looks at
    _meter = meter
