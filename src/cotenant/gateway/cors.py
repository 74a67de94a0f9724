"""Which pages of other sites may call the gateway from a browser: CORS, for origins that an operator has named.

Theory of operation. A browser sends a page's origin with each call, and shows the page the answer only if the server
names that origin. Before a call with a token it asks by an OPTIONS request, the preflight. The gateway answers for the
named origins, each by itself and never `*`. It allows no cookies (`access-control-allow-credentials` is not sent): a
page calls with the API token that it was given, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers

from cotenant.rpc.endpoints import TO

PREFLIGHT_SECONDS = 600  # for which browsers keep the answer
VERBS = "GET, POST, PUT, PATCH, DELETE"
REQUEST_HEADERS = f"authorization, content-type, {TO}"
RESPONSE_HEADERS = "retry-after, www-authenticate"


def answer_headers(allowed: Collection[str], headers: Headers) -> dict[str, str]:
    """Return the headers with which a browser shows the answer to the page that asked; none for other pages."""
    if not allowed:
        return {}
    if (origin := headers.get("origin", "")) not in allowed:
        return {"vary": "origin"}
    return {
        "access-control-allow-origin": origin,
        "access-control-expose-headers": RESPONSE_HEADERS,
        "vary": "origin",
    }


def is_preflight(method: str, headers: Headers) -> bool:
    """Return whether a browser asks if a page may call."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def preflight_headers(allowed: Collection[str], headers: Headers) -> dict[str, str]:
    """Return the headers of the answer to a preflight; a page that may not call gets none that allow it."""
    found = answer_headers(allowed, headers)
    if "access-control-allow-origin" in found:
        found |= {
            "access-control-allow-methods": VERBS,
            "access-control-allow-headers": REQUEST_HEADERS,
            "access-control-max-age": str(PREFLIGHT_SECONDS),
        }
    return found
