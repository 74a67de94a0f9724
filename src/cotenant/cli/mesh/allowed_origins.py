"""The origins of `--allow-origin`: sites whose pages may call the gateway from a browser."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:]+\])(?::\d{1,5})?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def read_origin(text: str) -> str:
    """Return an origin as browsers send it: in lower case, without a path and without the default port.

    >>> read_origin("https://Portal.example.org:443/"), read_origin("http://[::1]:8080")
    ('https://portal.example.org', 'http://[::1]:8080')

    Raises:
        ValueError: it is none.
    """
    origin = text.strip().lower().removesuffix("/")
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"must be an origin such as https://portal.example.org, not {text!r}")
    scheme = origin.partition(":")[0]
    return origin.removesuffix(f":{_DEFAULT_PORTS[scheme]}")


def read_origins(texts: Iterable[str]) -> tuple[str, ...]:
    """Return some origins, each once.

    Raises:
        ValueError: names each that is none.
    """
    origins, wrong = list[str](), list[str]()
    for text in texts:
        try:
            origins.append(read_origin(text))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(dict.fromkeys(origins))
