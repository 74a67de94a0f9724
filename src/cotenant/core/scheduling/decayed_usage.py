"""Decayed usage: what was held, in resource-seconds that lose half of their value with each half-life.

Theory of operation. Holding an amount `a` from time s to e counts, at a time t ≥ e, as the integral of
a · 2^(-(t - x) / h) over x from s to e, with the half-life h. With τ = h / ln 2 that is a · τ · (2^(-(t - e) / h) -
2^(-(t - s) / h)). So what is held since the last update, and what was held in any earlier interval, is added exactly in
constant time, however often the value is read in between, as in Slurm's multifactor priority plugin [R].

A tenant that always holds an amount `a` has the usage a · τ. Divided by τ, decayed usage is therefore an amount: the
average that was held, where time long ago counts less. It adds up with what is held now, and has a share of the cluster
as that has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cotenant.core.model.resources import KINDS, NAMES, NOTHING

NO_USAGE = (0.0,) * len(KINDS)


@dataclass(frozen=True, slots=True)
class DecayedUsage:
    """Decayed usage as of a time, one amount for each of `KINDS`, in its unit times seconds.

    >>> round(DecayedUsage(3600.0).advanced(36000.0, (1000, 0, 0, 0)).advanced(39600.0).average[0], 6)
    499.511719
    """

    half_life_seconds: float
    at_seconds: float = 0.0
    amounts: tuple[float, ...] = NO_USAGE

    def __post_init__(self) -> None:
        """Check all fields.

        Raises:
            ValueError: names every invalid field.
        """
        half_life = self.half_life_seconds
        wrong = [] if 0 < half_life < math.inf else [f"half_life_seconds must be finite and above 0, not {half_life:g}"]
        _raise(*wrong, *_not_finite(at_seconds=self.at_seconds), *_bad_amounts("amounts", self.amounts))

    @property
    def span_seconds(self) -> float:
        """The decayed length of all time before: what holding 1 for ever comes to."""
        return self.half_life_seconds / math.log(2)

    @property
    def average(self) -> tuple[float, ...]:
        """What was held on decayed average, in the units of `KINDS`."""
        span = self.span_seconds
        return tuple([amount / span for amount in self.amounts])

    def advanced(self, to_seconds: float, held: Sequence[float] = NOTHING) -> DecayedUsage:
        """Return the usage at a later time, if amounts were held from now until then.

        Raises:
            ValueError: the time is not finite or before that of the usage, or an amount is invalid.
        """
        lasts = to_seconds - self.at_seconds
        early = [f"to_seconds must not be before {self.at_seconds:g}, not {to_seconds:g}"] if lasts < 0 else []
        _raise(*_not_finite(to_seconds=to_seconds), *early, *_bad_amounts("held", held))
        kept, added = math.exp2(-lasts / self.half_life_seconds), self._weight(lasts)
        amounts = tuple([old * kept + new * added for old, new in zip(self.amounts, held, strict=True)])
        return replace(self, at_seconds=to_seconds, amounts=amounts)

    def charged(self, held: Sequence[float], since_seconds: float, until_seconds: float) -> DecayedUsage:
        """Return the usage with what was held in an interval of the past.

        Raises:
            ValueError: the interval is not one, or ends after the time of the usage, or an amount is invalid.
        """
        return self._with(held, since_seconds, until_seconds, 1)

    def refunded(self, held: Sequence[float], since_seconds: float, until_seconds: float) -> DecayedUsage:
        """Return the usage without what was held in an interval of the past; never less than nothing.

        Raises:
            ValueError: as `charged`.
        """
        return self._with(held, since_seconds, until_seconds, -1)

    def _with(self, held: Sequence[float], since: float, until: float, sign: int) -> DecayedUsage:
        early = [f"until_seconds must not be before {since:g}, not {until:g}"] if until < since else []
        late = (
            [f"until_seconds must not be after {self.at_seconds:g}, not {until:g}"] if until > self.at_seconds else []
        )
        _raise(*_not_finite(since_seconds=since, until_seconds=until), *early, *late, *_bad_amounts("held", held))
        weight = sign * self._weight(until - since) * math.exp2(-(self.at_seconds - until) / self.half_life_seconds)
        amounts = tuple([max(0.0, old + new * weight) for old, new in zip(self.amounts, held, strict=True)])
        return replace(self, amounts=amounts)

    def _weight(self, lasts: float) -> float:
        """Return what holding 1 for this long comes to at the end of that time."""
        return -math.expm1(-lasts * math.log(2) / self.half_life_seconds) * self.span_seconds


def _not_finite(**values: float) -> Iterator[str]:
    for name, value in values.items():
        if not math.isfinite(value):
            yield f"{name} must be finite, not {value:g}"


def _bad_amounts(name: str, amounts: Sequence[float]) -> Iterator[str]:
    if len(amounts) != len(NAMES):
        yield f"{name} must have {len(NAMES)} amounts, not {len(amounts)}"
        return
    for kind, amount in zip(NAMES, amounts, strict=True):
        if not 0 <= amount < math.inf:
            yield f"{name}.{kind} must be finite and not negative, not {amount:g}"


def _raise(*problems: str) -> None:
    if problems:
        raise ValueError("; ".join(problems))
