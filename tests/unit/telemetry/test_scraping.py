"""Metrics as Prometheus scrapes them."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tools.metrics import instruments, prometheus_name

from cotenant import telemetry
from cotenant.cli.mesh.metrics_endpoints import expose_metrics, metrics_addresses
from cotenant.cli.outcome import CommandError
from cotenant.telemetry import metrics
from cotenant.telemetry.metrics import Counter, Gauge, Histogram
from cotenant.telemetry.scraping import CannotServeMetrics

if TYPE_CHECKING:
    from tests.support.otlp_receiver import OtlpReceiver

pytest_plugins = ("tests.support.otlp_receiver",)
KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


@pytest.fixture(autouse=True)
def _off_at_the_end() -> Iterator[None]:
    yield
    telemetry.shutdown()


def scraped(address: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of all series by name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
        text = page.read().decode()
    series: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return series


def test_every_metric_has_the_name_that_the_page_of_metrics_gives() -> None:
    address = telemetry.expose("127.0.0.1", 0)
    telemetry.setup("test")
    listed = [metric for metric in instruments() if metric.name.startswith("cotenant.")]
    for metric in listed:
        made = KINDS[metric.kind](metric.name, metric.unit, metric.description)
        match made:
            case Counter():
                made.add(2)
            case Gauge():
                made.set(2)
            case Histogram():
                made.record(2)
    series = scraped(address)
    assert len(listed) > 50
    for metric in listed:
        tail = "_sum" if metric.kind == "histogram" else ""
        assert series[prometheus_name(metric) + tail] == {(): 2.0}, metric


async def test_metrics_are_scraped_and_exported_at_once(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_known", {})  # the page of metrics must not list this test's
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", otlp.endpoint)
    address = telemetry.expose("127.0.0.1", 0)
    telemetry.setup("test")
    telemetry.counter("cotenant.test.placed", "{job}").add(3, tenant="a")
    assert scraped(address)["cotenant_test_placed_total"] == {("a",): 3.0}
    await asyncio.to_thread(telemetry.shutdown)
    assert otlp.metrics["cotenant.test.placed"][0].sum.data_points[0].as_int == 3


def test_a_shutdown_releases_the_address() -> None:
    address = telemetry.expose("127.0.0.1", 0)
    telemetry.setup("test")
    telemetry.shutdown()
    with pytest.raises(urllib.error.URLError):
        scraped(address)
    host, port = address.split(":")
    assert telemetry.expose(host, int(port)) == address


def test_an_address_in_use_and_an_unknown_host_are_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=f"cannot serve metrics at 127.0.0.1:{port}: Address already in use"):
            expose_metrics("127.0.0.1", port)
    with pytest.raises(CannotServeMetrics, match=r"nowhere\.invalid:9464"):
        telemetry.expose("nowhere.invalid", 9464)


@pytest.mark.parametrize("text", ["host", "1.2.3.4:", ":9464", "70000", "1.2.3.4:99999", "９464"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--metrics must be HOST:PORT or PORT"):
        metrics_addresses(text)


def test_ports_above_the_last_one_are_refused() -> None:
    assert metrics_addresses("65534", 2)
    with pytest.raises(CommandError, match="3 consecutive ports"):
        metrics_addresses("65534", 3)
