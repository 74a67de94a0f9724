"""Where `up` and `serve` offer their metrics to Prometheus: one address for each process."""

from __future__ import annotations

from cotenant.cli.outcome import CommandError, note, usage_error

METAVAR = "[HOST:]PORT"
HELP = "Serve metrics to Prometheus here, without authentication; a port alone: on loopback."


def metrics_addresses(text: str, processes: int = 1) -> list[tuple[str, int]]:
    """Return the address of each process's metrics: consecutive ports from the given one, or free ones for port 0.

    >>> metrics_addresses("9464", 2), metrics_addresses("[::1]:0", 2), metrics_addresses("")
    ([('127.0.0.1', 9464), ('127.0.0.1', 9465)], [('::1', 0), ('::1', 0)], [])

    Raises:
        CommandError: the text is no address, or there are too few ports above it.
    """
    if not text:
        return []
    from cotenant.telemetry.scraping import PORT_MAX, parse_address  # opentelemetry is of an extra

    try:
        host, port = parse_address(text)
    except ValueError as error:
        raise usage_error(f"--metrics {error}") from None
    if port + processes - 1 > PORT_MAX:
        raise usage_error(f"--metrics {text} needs {processes} consecutive ports, one per process, up to {PORT_MAX}")
    return [(host, port + number if port else 0) for number in range(processes)]


def expose_metrics(host: str, port: int) -> None:
    """Serve this process's metrics at an address, and print it.

    Raises:
        CommandError: it cannot be bound.
    """
    from cotenant import telemetry
    from cotenant.telemetry.scraping import CannotServeMetrics

    try:
        address = telemetry.expose(host, port)
    except CannotServeMetrics as error:
        raise CommandError(str(error), hint="choose another address with --metrics, or 0 for a free port") from None
    note(f"metrics are served at http://{address}/metrics")
