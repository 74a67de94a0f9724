"""Times as Slurm writes and reads them."""

from __future__ import annotations

import re
import time
from datetime import datetime, timedelta

UNLIMITED = ("UNLIMITED", "INFINITE", "-1")
NONE = "N/A"
UNKNOWN = "Unknown"
MINUTE, HOUR, DAY = 60, 3600, 86_400
_LIMIT = r"(?a)(?:(\d{1,6})-(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,6}))?|(\d{1,9})(?::(\d{1,6}))?(?::(\d{1,6}))?)"
_UNITS = {"s": 1, "m": MINUTE, "h": HOUR, "d": DAY, "w": 7 * DAY}
_FROM_NOW = r"(?ai)now(?:\+(\d{1,9})(s|m|h|d|w)?[a-z]*)?"
_NAMED_HOURS = {"midnight": 0, "noon": 12, "fika": 15, "teatime": 16}
_DAYS = {"today": 0, "tomorrow": 1}
_CLOCK = r"(?ai)(\d{1,2}):(\d{2})(?::(\d{2}))?\s*(am|pm)?"
_DATES = ("%Y-%m-%d", "%m%d%y", "%m/%d/%y", "%m.%d.%y", "%m/%d", "%m.%d")
_CLOCKS = ("", "T%H:%M", "T%H:%M:%S")


def read_limit(text: str) -> int | None:
    """Return a time limit in seconds, a multiple of a minute; None if there is no limit.

    >>> [read_limit(text) for text in ("30", "1:30", "2:00:00", "1-12", "1-0:30", "0", "UNLIMITED")]
    [1800, 120, 7200, 129600, 88200, None, None]

    Raises:
        ValueError: the text is not a time limit.
    """
    if text.upper() in UNLIMITED:
        return None
    match = re.fullmatch(_LIMIT, text.strip())
    if not match:
        raise ValueError(text)
    days, hours, minutes, seconds, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        total = days * DAY + (hours or 0) * HOUR + (minutes or 0) * MINUTE + (seconds or 0)
    elif third is not None:
        total = (first or 0) * HOUR + (second or 0) * MINUTE + third
    else:
        total = (first or 0) * MINUTE + (second or 0)
    return -(-total // MINUTE) * MINUTE or None


def write_period(seconds: float) -> str:
    """Return a period as `squeue` shows it.

    >>> [write_period(seconds) for seconds in (5, 3723, 90000)]
    ['0:05', '1:02:03', '1-01:00:00']
    """
    days, rest = divmod(max(0, int(seconds)), DAY)
    hours, rest = divmod(rest, HOUR)
    clock = f"{rest // MINUTE:02d}:{rest % MINUTE:02d}"
    if days:
        return f"{days}-{hours:02d}:{clock}"
    return f"{hours}:{clock}" if hours else clock[1:] if clock[0] == "0" else clock


def write_elapsed(seconds: float) -> str:
    """Return a period as `sacct` and `scontrol` show it.

    >>> write_elapsed(5), write_elapsed(90000)
    ('00:00:05', '1-01:00:00')
    """
    days, rest = divmod(max(0, int(seconds)), DAY)
    return (f"{days}-" if days else "") + f"{rest // HOUR:02d}:{rest % HOUR // MINUTE:02d}:{rest % MINUTE:02d}"


def write_cpu(seconds: float) -> str:
    """Return CPU time as `sacct` shows it: with milliseconds below an hour.

    >>> write_cpu(65.25), write_cpu(3600.0)
    ('01:05.250', '01:00:00')
    """
    milliseconds = max(0, round(seconds * 1000))
    if milliseconds >= HOUR * 1000:
        return write_elapsed(milliseconds // 1000)
    minutes, rest = divmod(milliseconds, MINUTE * 1000)
    return f"{minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"


def write_time(unix_seconds: float | None, absent: str = NONE) -> str:
    """Return a moment in local time."""
    return absent if unix_seconds is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(unix_seconds))


def read_moment(text: str, now: float) -> float:
    """Return a moment as `--begin` names it, in Unix seconds.

    >>> read_moment("now+2hours", 1000.0), read_moment("now+90", 1000.0), read_moment("now", 1000.0)
    (8200.0, 1090.0, 1000.0)

    Raises:
        ValueError: the text is not a moment.
    """
    text = text.strip()
    if match := re.fullmatch(_FROM_NOW, text):
        return now + int(match[1] or 0) * _UNITS[(match[2] or "s").lower()]
    today = datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)
    for date in _DATES:
        for clock in _CLOCKS:
            try:
                found = datetime.strptime(text if "%y" in date.lower() else f"{today.year} {text}", _form(date) + clock)
            except ValueError:
                continue
            return _at(found)
    return _at_clock(text.lower(), today, now)


def _form(date: str) -> str:
    """Return the format of a date; one without a year gets this year, since day and month alone are ambiguous."""
    return date if "%y" in date.lower() else f"%Y {date}"


def _at_clock(text: str, today: datetime, now: float) -> float:
    """Return the next moment of a time of the day, or that of a named day."""
    words = text.split()
    day = words.pop() if words and words[-1] in _DAYS else ""
    hour = " ".join(words)
    if day and not hour:
        return max(now, _at(today + timedelta(days=_DAYS[day])))
    match = re.fullmatch(_CLOCK, hour)
    if hour in _NAMED_HOURS:
        found = today.replace(hour=_NAMED_HOURS[hour])
    elif match:
        past_noon = 12 if (match[4] or "").lower() == "pm" else 0
        found = today.replace(
            hour=int(match[1]) % (12 if match[4] else 24) + past_noon, minute=int(match[2]), second=int(match[3] or 0)
        )
    else:
        raise ValueError(text)
    if day:
        return _at(found + timedelta(days=_DAYS[day]))
    return _at(found if _at(found) > now else found + timedelta(days=1))


def _at(moment: datetime) -> float:
    """Return a local time in Unix seconds.

    Raises:
        ValueError: it is outside the calendar.
    """
    try:
        return moment.timestamp()
    except (OverflowError, OSError) as error:
        raise ValueError(str(moment)) from error
