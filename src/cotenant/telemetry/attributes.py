"""Attributes of spans and metrics, as OpenTelemetry allows them."""

from __future__ import annotations

from collections.abc import Sequence

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
