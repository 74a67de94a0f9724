"""The validity of a certificate, and when it is due for renewal."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from cotenant.v1 import certificate_pb2

CA_DAYS, LEAF_DAYS = 3650, 365  # of an authority and of its certificates, unless asked otherwise
DUE_BEFORE = timedelta(days=30)
DUE_PART = 3  # of a shorter validity than three months, the last third


@dataclass(frozen=True, slots=True)
class Validity:
    """The begin and end of a validity, in UTC."""

    begins: datetime
    ends: datetime

    def is_due(self, now: datetime) -> bool:
        """Return whether it is due for renewal: less than 30 days, or less than a third of its time, is left.

        >>> from datetime import UTC
        >>> new_year = datetime(2026, 1, 1, tzinfo=UTC)
        >>> of_a_year = Validity(new_year, new_year + timedelta(days=365))
        >>> [of_a_year.is_due(new_year + timedelta(days=days)) for days in (334, 336)]
        [False, True]
        >>> of_three_days = Validity(new_year, new_year + timedelta(days=3))
        >>> [of_three_days.is_due(new_year + timedelta(hours=hours)) for hours in (47, 49)]
        [False, True]
        """
        return self.ends - now < min(DUE_BEFORE, (self.ends - self.begins) / DUE_PART)

    def in_words(self, now: datetime) -> str:
        """Return how long it is still valid, or since when it is not.

        >>> from datetime import UTC
        >>> three = Validity(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 4, tzinfo=UTC))
        >>> three.in_words(datetime(2026, 1, 2, 12, tzinfo=UTC)), three.in_words(datetime(2026, 1, 3, 22, tzinfo=UTC))
        ('expires in 1 day', 'expires in 2 hours')
        >>> three.in_words(datetime(2026, 1, 9, tzinfo=UTC))
        'expired on 2026-01-04'
        """
        left = self.ends - now
        if left < timedelta():
            return f"expired on {self.ends:%Y-%m-%d}"
        count, unit = (left.days, "day") if left.days else (left.seconds // 3600, "hour")
        return f"expires in {count} {unit}{'s' * (count != 1)}"

    def to_wire(self) -> certificate_pb2.Certificate:
        """Encode it as a message."""
        message = certificate_pb2.Certificate()
        message.begin_time.FromDatetime(self.begins)
        message.expire_time.FromDatetime(self.ends)
        return message
