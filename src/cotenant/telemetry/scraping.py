"""Serves a process's metrics to Prometheus over HTTP, with or without export by OTLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

LOOPBACK = "127.0.0.1"
PORT_MAX = 65_535


class CannotServeMetrics(OSError):
    """The address of the metrics cannot be bound."""


class MetricsEndpoint:
    """An HTTP server for one registry, with a thread of its own, so that a busy event loop does not delay a scrape."""

    def __init__(self, host: str, port: int) -> None:
        """Bind the address and serve.

        Raises:
            CannotServeMetrics: it cannot be bound.
        """
        from prometheus_client import CollectorRegistry, start_http_server  # only where metrics are scraped

        self.registry: CollectorRegistry = CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, host, self.registry)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CannotServeMetrics(f"cannot serve metrics at {written(host, port)}: {why}") from None
        self.address = written(host, self._server.server_port)

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, or of a port alone, which means loopback.

    >>> parse_address("9464"), parse_address("0.0.0.0:9464"), parse_address("[::1]:0")
    (('127.0.0.1', 9464), ('0.0.0.0', 9464), ('::1', 0))

    Raises:
        ValueError: the text is neither.
    """
    host, colon, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) > PORT_MAX or (colon and not host):
        raise ValueError(f"must be HOST:PORT or PORT, with a port up to {PORT_MAX}, not {text!r}")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def written(host: str, port: int) -> str:
    """Return an address as text; an IPv6 host is put in brackets.

    >>> written("::1", 9464)
    '[::1]:9464'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
