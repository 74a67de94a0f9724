"""Parsing and formatting of quantities: `2h30m`, `4GiB`, `0.5` GPUs, `auto` cores.

Every parser raises `ValueError` naming what it expects; every formatter returns text that its parser accepts.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal

AUTO = "auto"
REQUEST_ID_LENGTH_MAX = 120  # leaves room for a suffix
WHOLE_GPU_MILLI = 1000  # as in `core.model.job`, whose import takes longer than a command
DATES_BEGIN, DATES_END = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (1, 9999))
DURATION_SECONDS_MAX = 100 * 365 * 86_400.0
INTEGER_MAX = 2**63 - 1
SECONDS_OF = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86_400)}
BYTES_OF = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T", "P"), 1)},
}

_PART = r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)"
_DURATION = re.compile(rf"(?:{_PART})+")
_TIME_OF_DAY = re.compile(r"([0-9]{1,2})(:[0-9]{2}(?::[0-9]{2})?)")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)")
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][-+]?[0-9]{1,3})?")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_TEXT_LENGTH_MAX = 100  # of a quantity; bounds the cost of matching


def shown(text: str) -> str:
    """Return a text as error messages show it."""
    from cotenant.core.model import field_limits

    return field_limits.shown(text)


def parse_seconds(text: str) -> float:
    """Return a duration in seconds; a number without a unit is in seconds.

    >>> parse_seconds("2h30m"), parse_seconds("90"), parse_seconds("250ms")
    (9000.0, 90.0, 0.25)
    """
    stripped = text.strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", stripped):
        stripped += "s"
    if len(stripped) > _TEXT_LENGTH_MAX or not _DURATION.fullmatch(stripped):
        raise ValueError(f"must be a duration such as 30s, 10m or 2h30m, not {shown(text)}")
    seconds = float(sum(Decimal(count) * SECONDS_OF[unit] for count, unit in re.findall(_PART, stripped)))
    if seconds > DURATION_SECONDS_MAX:
        raise ValueError(f"must be at most 100 years, not {shown(text)}")
    return seconds


def write_seconds(seconds: float) -> str:
    """Return a duration as text, exact to a millisecond.

    >>> write_seconds(9000), write_seconds(90.25), write_seconds(0)
    ('2h30m', '1m30s250ms', '0s')
    """
    left = round(seconds * 1000)
    parts = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, left = divmod(left, int(SECONDS_OF[unit] * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def short_seconds(seconds: float) -> str:
    """Return a duration for a table: at most two units, at most six characters below 100 days.

    >>> [short_seconds(seconds) for seconds in (0.25, 45.2, 192, 7500, 273_600)]
    ['0.2s', '45s', '3m12s', '2h05m', '3d4h']
    """
    if seconds < 10:
        return f"{max(0.0, seconds):.1f}s" if seconds % 1 else f"{seconds:.0f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


def parse_bytes(text: str) -> int:
    """Return a size in bytes; every size but 0 needs a unit.

    >>> parse_bytes("4GiB"), parse_bytes("1.5 GB"), parse_bytes("512Mi"), parse_bytes("0")
    (4294967296, 1500000000, 536870912, 0)
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"must be a size such as 512MiB or 4GiB, not {shown(text)}")
    count, unit = Decimal(match[1]), match[2]
    if not unit and count:
        raise ValueError(f"needs a unit: {text.strip()}MiB or {text.strip()}GiB?")
    factor = _bytes_of(unit)
    if factor is None:
        raise ValueError(f"has an unknown unit; use for example MiB or GiB: {shown(text)}")
    size = count * factor
    if size != int(size) or size > INTEGER_MAX:
        raise ValueError(f"must be a whole number of bytes below 8 EiB, not {shown(text)}")
    return int(size)


def _bytes_of(unit: str) -> int | None:
    """Return the bytes in a unit; `Gi` is GiB and `G` is GB, in upper or lower case."""
    known = {name.lower(): factor for name, factor in BYTES_OF.items()}
    lower = unit.lower()
    return 1 if not unit else known.get(lower, known.get(f"{lower}b"))


def write_bytes(size: int) -> str:
    """Return a size as exact text, in the largest unit that divides it.

    >>> write_bytes(4 * 2**30), write_bytes(1536 * 2**20), write_bytes(1000), write_bytes(0)
    ('4GiB', '1536MiB', '1000B', '0')
    """
    if size == 0:
        return "0"
    binary = [(name, factor) for name, factor in BYTES_OF.items() if name.endswith("iB") or name == "B"]
    name, factor = max((pair for pair in binary if size % pair[1] == 0), key=lambda pair: pair[1])
    return f"{size // factor}{name}"


def short_bytes(size: float) -> str:
    """Return a size for a table.

    >>> [short_bytes(size) for size in (0, 1536 * 2**20, 503 * 2**30)]
    ['0', '1.5GiB', '503GiB']
    """
    for name in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or name == "TiB":
            break
        size /= 1024
    return "0" if not size else f"{size:.0f}{name}" if size >= 10 or size == int(size) else f"{size:.1f}{name}"


def parse_gpu_milli(text: str) -> int:
    """Return GPUs in thousandths.

    >>> parse_gpu_milli("8"), parse_gpu_milli("0.5")
    (8000, 500)
    """
    stripped = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", stripped):
        raise ValueError(f"must be a number of GPUs such as 1, 8 or 0.5, not {shown(text)}")
    milli = Decimal(stripped) * WHOLE_GPU_MILLI
    if milli != int(milli):
        raise ValueError(f"must be a multiple of 0.001 GPUs, not {shown(text)}")
    return int(milli)


def write_gpus(milli: int) -> str:
    """Return thousandths of GPUs as text.

    >>> write_gpus(8000), write_gpus(500)
    ('8', '0.5')
    """
    return f"{milli / WHOLE_GPU_MILLI:g}" if abs(milli) < 10**8 else str(Decimal(milli) / WHOLE_GPU_MILLI)


def parse_cores(text: str) -> int | None:
    """Return a number of cores; None for `auto`.

    >>> parse_cores("6"), parse_cores("auto")
    (6, None)
    """
    if text.strip().lower() == AUTO:
        return None
    try:
        return parse_integer(text)
    except ValueError:
        raise ValueError(f"must be a whole number of cores or auto, not {shown(text)}") from None


def write_cores(cores: int | None) -> str:
    """Return a number of cores as text.

    >>> write_cores(None), write_cores(6)
    ('auto', '6')
    """
    return AUTO if cores is None else str(cores)


def parse_replicas(text: str) -> int | tuple[int, int] | None:
    """Return a number of replicas, or an elastic job's minimum and maximum; None for `auto`.

    >>> parse_replicas("3"), parse_replicas("1..8"), parse_replicas("auto")
    (3, (1, 8), None)
    """
    if text.strip().lower() == AUTO:
        return None
    least, range_, most = text.partition("..")
    try:
        return (parse_integer(least), parse_integer(most)) if range_ else parse_integer(text)
    except ValueError:
        forms = "a whole number, a range such as 1..8, or auto" if range_ else "a whole number or auto"
        raise ValueError(f"must be {forms}, not {shown(text)}") from None


def parse_integer(text: str) -> int:
    """Return a whole number.

    >>> parse_integer("-12")
    -12
    """
    stripped = text.strip()
    if not _INTEGER.fullmatch(stripped) or abs(int(stripped)) > INTEGER_MAX:
        raise ValueError(f"must be a whole number, not {shown(text)}")
    return int(stripped)


def parse_number(text: str) -> float:
    """Return a number.

    >>> parse_number("99.9")
    99.9
    """
    if not _NUMBER.fullmatch(number := text.strip()):  # float() would reject some of what this strips
        raise ValueError(f"must be a number, not {shown(text)}")
    return float(number)


def parse_bool(text: str) -> bool:
    """Return whether the text is true, yes or on.

    >>> parse_bool("no")
    False
    """
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be true or false, not {shown(text)}") from None


def parse_moment(text: str, now: float) -> float:
    """Return a time in the past as unix time: how long ago, or an ISO 8601 date or time, local without an offset.

    >>> parse_moment("2h", now=10_000.0), parse_moment("2030-01-01T00:00:00Z", now=100.0)
    (2800.0, 1893456000.0)
    """
    try:
        return max(0.0, now - parse_seconds(text))
    except ValueError:
        pass  # not a duration
    try:
        return max(0.0, datetime.fromisoformat(text.strip()).timestamp())
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"must be a time such as 2d, 2030-01-31 or 2030-01-31T18:00, not {shown(text)}") from None


def parse_time(text: str, now: float) -> float:
    """Return a coming time as unix time: a duration from now, the next time of day, or an ISO 8601 time.

    Without an offset, times are local.

    >>> parse_time("2h", now=100.0), parse_time("+10m", now=100.0), parse_time("2030-01-01T00:00:00Z", now=100.0)
    (7300.0, 700.0, 1893456000.0)
    """
    try:
        return now + parse_seconds(text.strip().removeprefix("+"))
    except ValueError:
        pass  # not a duration
    try:
        if match := _TIME_OF_DAY.fullmatch(text.strip()):
            return _next_time_of_day(time.fromisoformat(f"{match[1]:0>2}{match[2]}"), now)
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"must be a time such as 2h, 17:30 or 2030-01-31T18:00, not {shown(text)}") from None


def _next_time_of_day(wanted: time, now: float) -> float:
    """Return the next local time of day after now, as unix time."""
    today = datetime.combine(datetime.fromtimestamp(now), wanted)
    return today.timestamp() if today.timestamp() > now else (today + timedelta(days=1)).timestamp()


def has_date(unix_seconds: float) -> bool:
    """Return whether a time has a date; a wrong clock may be millions of years off."""
    return DATES_BEGIN <= unix_seconds < DATES_END


def format_time(unix_seconds: float) -> str:
    """Return a time as text; a time without a date as seconds.

    >>> format_time(0.25), format_time(1e15)
    ('1970-01-01T00:00:00.250Z', '1e+15 s')
    """
    if not has_date(unix_seconds):
        return f"{unix_seconds:g} s"
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
