"""Reads an etcd member's quota, which its status lacks, from the metrics that it serves beside its API."""

from __future__ import annotations

import asyncio
import re
import ssl
import urllib.request
from http.client import HTTPException

from cotenant.security.tls_files import WatchedTlsFiles

SECONDS_MAX = 1.0
BYTES_MAX = 4 * 1024**2  # of a page of metrics
QUOTA = re.compile(rb"^etcd_server_quota_backend_bytes (\S+)$", re.MULTILINE)


async def read_quota(endpoint: str, tls: WatchedTlsFiles | None = None) -> int:
    """Return a member's quota in bytes; 0 if it cannot be read, for example if metrics are served elsewhere."""
    try:
        return await asyncio.to_thread(_read, endpoint, tls)
    except (OSError, ValueError, OverflowError, HTTPException):  # ssl.SSLError and urllib's errors are OSErrors
        return 0


def _read(endpoint: str, tls: WatchedTlsFiles | None) -> int:
    scheme = "https" if tls else "http"
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls:
        handlers.append(urllib.request.HTTPSHandler(context=_context(tls)))
    opener = urllib.request.build_opener(*handlers)
    with opener.open(f"{scheme}://{endpoint}/metrics", timeout=SECONDS_MAX) as page:
        found = QUOTA.search(page.read(BYTES_MAX))
    return max(0, int(float(found[1]))) if found else 0


def _context(tls: WatchedTlsFiles) -> ssl.SSLContext:
    """Return a client's TLS context from the current files."""
    files = tls.files
    context = ssl.create_default_context(cafile=files.ca)
    if files.cert and files.key:
        context.load_cert_chain(files.cert, files.key)
    return context
