"""Turns logs on, and spans, metrics and log records if the standard environment variables or `expose` enable them."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from cotenant.telemetry import metrics, records, tracing
from cotenant.telemetry.lines import logger
from cotenant.telemetry.log_levels import LEVEL_DEFAULT, LEVEL_OF_SERVICE

if TYPE_CHECKING:
    from cotenant.telemetry.otel import Metrics, Records, Tracing
    from cotenant.telemetry.scraping import MetricsEndpoint

log = logger()

SIGNALS = ("TRACES", "METRICS", "LOGS")
GRPC, HTTP = "grpc", "http/protobuf"
PROTOCOLS = (GRPC, HTTP)

_running: list[Tracing | Metrics | Records] = []
_endpoint: MetricsEndpoint | None = None


def expose(host: str, port: int) -> str:
    """Serve this process's metrics to Prometheus until `shutdown`, and return the address. Call it before `setup`.

    Raises:
        CannotServeMetrics: the address cannot be bound.
    """
    global _endpoint  # what `setup` gives the metrics to
    from cotenant.telemetry.scraping import MetricsEndpoint

    assert _endpoint is None
    assert not _running
    _endpoint = MetricsEndpoint(host, port)
    return _endpoint.address


def setup(service: str, *, prefix: str = "") -> None:
    """Set up this process's telemetry. A later call changes the logs only.

    On a terminal each log line begins with the prefix, because several processes may share the terminal.

    Reads COTENANT_LOG (debug, info, warning, error, critical), COTENANT_LOG_FORMAT (json, text) and the standard OTEL_
    variables.
    """
    from cotenant.telemetry import logs  # see `lines`

    environment = os.environ
    level = environment.get("COTENANT_LOG") or LEVEL_OF_SERVICE.get(service, LEVEL_DEFAULT)
    logs.configure(service, level, prefix=prefix)
    if _running:
        return
    wanted = {signal: protocol_of(environment, signal) for signal in SIGNALS if wants(environment, signal)}
    if wanted or _endpoint:
        _start(service, wanted)


def shutdown() -> None:
    """Export what is left, then turn spans, metrics and records off. Does nothing if they are off."""
    global _endpoint
    tracing.install(None)
    records.install(None)
    metrics.install(None)
    while _running:
        _running.pop().shutdown()
    if _endpoint:
        _endpoint.close()
        _endpoint = None


def wants(environment: Mapping[str, str], signal: str) -> bool:
    """Return whether the environment enables a signal, TRACES, METRICS or LOGS, to be exported by OTLP.

    >>> wants({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317"}, "TRACES")
    True
    >>> wants({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_TRACES_EXPORTER": "none"}, "TRACES")
    False
    >>> wants({}, "TRACES")
    False
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter not in ("", "otlp", "none"):
        log.warning("exporter_unknown", signal=signal.lower(), given=exporter, known=["otlp", "none"])
    asked = exporter == "otlp" or (exporter == "" and bool(_of(environment, signal, "ENDPOINT")))
    protocol = protocol_of(environment, signal)
    if asked and protocol not in PROTOCOLS:
        log.warning("protocol_unknown", signal=signal.lower(), given=protocol, known=[*PROTOCOLS])
        return False
    return asked


def protocol_of(environment: Mapping[str, str], signal: str) -> str:
    """Return the protocol by which a signal is exported: `grpc`, unless a variable says otherwise.

    >>> protocol_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "LOGS")
    'http/protobuf'
    """
    return _of(environment, signal, "PROTOCOL") or GRPC


def _of(environment: Mapping[str, str], signal: str, what: str) -> str:
    """Return a variable of the exporter; the signal's own overrides the common one."""
    own, common = f"OTEL_EXPORTER_OTLP_{signal}_{what}", f"OTEL_EXPORTER_OTLP_{what}"
    return environment.get(own) or environment.get(common, "")


def _start(service: str, wanted: Mapping[str, str]) -> None:
    """Start the wanted signals, given with their protocols, and the metrics that Prometheus scrapes."""
    # Imported here: the SDK costs a tenth of a second that a process without telemetry should not pay.
    from opentelemetry.sdk.resources import Resource

    from cotenant.telemetry.otel import Metrics, Records, Tracing

    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": f"cotenant-{service}"}
    if "service.instance.id" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        named["service.instance.id"] = f"{socket.gethostname()}:{os.getpid()}"  # distinguishes replicas and agents
    resource = Resource.create({"service.namespace": "cotenant", "service.version": version("cotenant"), **named})
    if "TRACES" in wanted:
        traces = Tracing(resource, wanted["TRACES"])
        tracing.install(traces)
        _running.append(traces)
    if "METRICS" in wanted or _endpoint:
        measures = Metrics(resource, wanted.get("METRICS", ""), _endpoint.registry if _endpoint else None)
        metrics.install(measures.meter)
        _running.append(measures)
    if "LOGS" in wanted:
        sink = Records(resource, wanted["LOGS"])
        records.install(sink)
        _running.append(sink)
    atexit.register(shutdown)
