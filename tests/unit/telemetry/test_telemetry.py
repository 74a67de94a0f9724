from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
import structlog

from cotenant import telemetry
from cotenant.codec import errors
from cotenant.rpc.channel import connect
from cotenant.rpc.server import Server
from cotenant.telemetry import logs, metrics
from cotenant.telemetry.switch import wants
from cotenant.v1 import policy_service_pb2 as pb
from cotenant.v1 import policy_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from tests.support.otlp_receiver import OtlpReceiver

pytest_plugins = ("tests.support.otlp_receiver",)

SERVICE = "cotenant.v1.PolicyService"
METHOD = f"/{SERVICE}/ListPolicies"


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start and end without telemetry."""
    for name in [name for name in os.environ if name.startswith(("OTEL_", "COTENANT_"))]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(metrics, "_known", {})  # the page of metrics must not list the instruments of tests
    yield
    telemetry.shutdown()
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def traced(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> OtlpReceiver:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp.endpoint)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    telemetry.setup("test")
    return otlp


async def flush() -> None:
    """Export what was recorded. In a thread, because the receiver runs in this loop."""
    await asyncio.to_thread(telemetry.shutdown)


def in_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "COTENANT_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=60, check=True
    )


def test_opentelemetry_is_not_imported_unless_enabled() -> None:
    code = """
import sys
from cotenant import telemetry
telemetry.setup("queue")
with telemetry.span("plan") as plan:
    assert plan.trace_parent == "" == telemetry.current()
assert telemetry.record("run", "", 1.0, 2.0) == "" == telemetry.root()
telemetry.counter("jobs").add()
telemetry.shutdown()
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert in_process(code).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_TRACES_EXPORTER": "zipkin", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, False),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, False),
    ],
)
def test_traces_are_enabled_only_by_the_standard_variables(environment: dict[str, str], asked: bool) -> None:
    assert wants(environment, "TRACES") is asked


def test_unsupported_exporters_are_logged() -> None:
    with structlog.testing.capture_logs() as lines:
        wants({"OTEL_TRACES_EXPORTER": "zipkin"}, "TRACES")
        wants({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, "METRICS")
    assert [(line["event"], line["given"]) for line in lines] == [
        ("exporter_unknown", "zipkin"),
        ("protocol_unknown", "http/json"),
    ]


async def test_spans_form_a_tree_with_times_and_attributes(traced: OtlpReceiver) -> None:
    with telemetry.span("cycle", jobs=2) as cycle:
        assert telemetry.current() == cycle.trace_parent
        with telemetry.span("order") as order:
            order.set(policy="las")
        recorded = telemetry.record("run", cycle.trace_parent, 1000.5, 1002.0, job="a")
    assert telemetry.current() == ""
    await flush()

    assert traced.tree() == {"cycle": {"run": {}, "order": {}}}
    run = traced.named("run")
    assert run.is_named_by(recorded)
    assert (run.start_seconds, run.end_seconds, run.attributes) == (1000.5, 1002.0, {"job": "a"})
    assert traced.named("order").attributes == {"policy": "las"}
    assert traced.named("cycle").attributes == {"jobs": 2}
    assert traced.named("cycle").service == "cotenant-test"


async def test_a_trace_continues_from_a_traceparent_whatever_span_is_active(traced: OtlpReceiver) -> None:
    with telemetry.span("something else"):
        submitted = telemetry.root("submit", job="a")
        with telemetry.span("place", submitted):
            pass
        telemetry.record("run", submitted, 1.0, 2.0)
    await flush()

    assert traced.named("submit").is_named_by(submitted)
    assert traced.named("place").trace_id == traced.named("run").trace_id == traced.named("submit").trace_id
    assert set(traced.tree()["submit"]) == {"place", "run"}
    assert traced.tree()["something else"] == {}


async def test_an_invalid_parent_starts_a_new_trace(traced: OtlpReceiver) -> None:
    with telemetry.span("outer"), telemetry.span("lost", "not a traceparent"):
        pass
    await flush()

    assert traced.named("lost").parent_id == ""
    assert traced.named("lost").trace_id != traced.named("outer").trace_id


async def test_a_parent_that_is_not_sampled_is_followed_and_not_exported(traced: OtlpReceiver) -> None:
    unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    with telemetry.span("quiet", unsampled) as quiet:
        assert quiet.trace_parent.startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert quiet.trace_parent.endswith("-00")
    telemetry.record("loud", "", 1.0, 2.0)
    await flush()

    assert [span.name for span in traced.spans] == ["loud"]


async def test_an_exception_marks_its_span_and_propagates(traced: OtlpReceiver) -> None:
    with pytest.raises(ValueError, match="broken"), telemetry.span("plan"):
        raise ValueError("broken")
    await flush()

    assert traced.named("plan").failed


class Tracer(pb_grpc.PolicyServiceServicer):
    async def ListPolicies(self, request: Any, context: Any) -> pb.ListPoliciesResponse:
        with telemetry.span("inside"):
            return pb.ListPoliciesResponse()


async def test_a_call_carries_its_trace_from_client_to_servicer(traced: OtlpReceiver) -> None:
    server = Server(token="secret")
    server.add(pb_grpc.add_PolicyServiceServicer_to_server, Tracer(), SERVICE)
    port = await server.start()
    async with connect(f"127.0.0.1:{port}", "secret") as channel:
        with telemetry.span("outside"):
            await pb_grpc.PolicyServiceStub(channel).ListPolicies(pb.ListPoliciesRequest())
    await server.stop(0)
    await flush()

    client, server_side = [span for span in traced.spans if span.name == METHOD]
    if client.parent_id != traced.named("outside").span_id:
        client, server_side = server_side, client
    assert client.parent_id == traced.named("outside").span_id
    assert server_side.parent_id == client.span_id
    assert traced.named("inside").parent_id == server_side.span_id


async def test_a_problem_arrives_completely_and_marks_the_call_while_tracing_is_on(traced: OtlpReceiver) -> None:
    class Failing(Tracer):
        async def ListPolicies(self, request: Any, context: Any) -> pb.ListPoliciesResponse:
            raise errors.not_found("policy", "fiffo", near=["fifo"])

    server = Server(token="secret")
    server.add(pb_grpc.add_PolicyServiceServicer_to_server, Failing(), SERVICE)
    port = await server.start()
    async with connect(f"127.0.0.1:{port}", "secret") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await pb_grpc.PolicyServiceStub(channel).ListPolicies(pb.ListPoliciesRequest())
    await server.stop(0)
    await flush()

    assert errors.from_error(failed.value).reason == "POLICY_NOT_FOUND"
    assert {span.attributes["rpc.grpc.status_code"] for span in traced.spans} == {grpc.StatusCode.NOT_FOUND.value[0]}
    assert len(traced.spans) == 2


async def test_counters_gauges_and_histograms_are_exported_if_enabled(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", otlp.endpoint)
    placed = telemetry.counter("cotenant.jobs.placed", "{job}", "Jobs that got their places.")
    waiting = telemetry.gauge("cotenant.jobs.waiting", "{job}")
    cycle = telemetry.histogram("cotenant.cycle.duration")
    placed.add(5)  # metrics are off: dropped
    telemetry.setup("test")
    placed.add(2, queue="default")
    placed.add(1, queue="default")
    waiting.set(7)
    cycle.record(0.25)
    await flush()

    assert otlp.metrics["cotenant.jobs.placed"][0].sum.data_points[0].as_int == 3
    assert otlp.metrics["cotenant.jobs.placed"][0].unit == "{job}"
    assert otlp.metrics["cotenant.jobs.waiting"][0].gauge.data_points[0].as_int == 7
    assert otlp.metrics["cotenant.cycle.duration"][0].histogram.data_points[0].sum == 0.25
    assert otlp.spans == []


async def test_replicas_of_a_service_differ_by_their_instances(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", otlp.endpoint)
    for told, instance in (("", f"{socket.gethostname()}:{os.getpid()}"), ("service.instance.id=a", "a")):
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", told)
        telemetry.setup("queue")
        telemetry.counter("cotenant.jobs.placed").add()
        await flush()
        assert otlp.resources[-1]["service.instance.id"] == instance
        assert otlp.resources[-1]["service.name"] == "cotenant-queue"


async def test_an_instrument_outlives_the_exporter_that_it_was_first_used_with(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", otlp.endpoint)
    placed = telemetry.counter("cotenant.jobs.placed")
    for _ in range(2):
        telemetry.setup("test")
        placed.add()
        await flush()
    assert [metric.sum.data_points[0].as_int for metric in otlp.metrics["cotenant.jobs.placed"]] == [1, 1]


def test_an_unavailable_collector_does_not_delay_the_end_of_a_command() -> None:
    code = """
import time
from cotenant import telemetry
telemetry.setup("cli")
telemetry.record("run", "", 1.0, 2.0)
start = time.monotonic()
telemetry.shutdown()
print(time.monotonic() - start)
"""
    done = in_process(code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_METRICS_EXPORTER="none")
    assert float(done.stdout) < 5


def lines_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stderr.splitlines()]


LOGGING = """
import structlog, logging
from cotenant import telemetry
telemetry.setup("{service}")
log = structlog.get_logger()
log.debug("looked")
log.info("job_placed", job="a")
log.warning("node_disconnected", node="n")
"""


def test_a_line_is_one_json_object_with_time_level_and_service() -> None:
    placed, away = lines_of(in_process(LOGGING.format(service="queue")))
    time = placed.pop("timestamp")
    assert placed == {"event": "job_placed", "job": "a", "level": "info", "service": "queue"}
    assert time.endswith("Z")
    assert away["level"] == "warning"


@pytest.mark.parametrize(
    ("service", "environment", "events"),
    [
        ("queue", {"COTENANT_LOG": "debug"}, ["looked", "job_placed", "node_disconnected"]),
        ("queue", {"COTENANT_LOG": "ERROR"}, []),
        ("queue", {"COTENANT_LOG": "loud"}, ["log_level_unknown", "job_placed", "node_disconnected"]),
        ("cli", {}, ["node_disconnected"]),
        ("cli", {"COTENANT_LOG": "info"}, ["job_placed", "node_disconnected"]),
    ],
)
def test_the_level_is_the_environments_and_a_command_is_quieter(
    service: str, environment: dict[str, str], events: list[str]
) -> None:
    done = in_process(LOGGING.format(service=service), **environment)
    assert [line["event"] for line in lines_of(done)] == events


def test_lines_of_libraries_have_the_same_format_and_no_traceback_shows_local_variables() -> None:
    code = """
import logging
from cotenant import telemetry
telemetry.setup("queue")
token = "very secret"
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("grpc").exception("call %s failed", 7)
    import structlog
    structlog.get_logger().exception("call_failed")
"""
    done = in_process(code)
    library, own = lines_of(done)
    assert (library["event"], library["logger"], library["service"]) == ("call 7 failed", "grpc", "queue")
    assert "ZeroDivisionError" in library["exception"]
    assert "ZeroDivisionError" in own["exception"]
    assert "very secret" not in done.stderr


async def test_a_line_within_a_span_names_its_trace(traced: OtlpReceiver) -> None:
    out = io.StringIO()
    logs.configure("test", "info", out)
    with telemetry.span("plan") as plan:
        structlog.get_logger().info("inside")
    structlog.get_logger().info("outside")
    inside, outside = [json.loads(line) for line in out.getvalue().splitlines()]
    assert inside["trace_id"] == plan.trace_parent.split("-")[1]
    assert "trace_id" not in outside
    await flush()


def test_a_terminal_gets_readable_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    logs.configure("queue", "info", out)
    structlog.get_logger().info("job_placed", job="a")
    assert "job_placed" in out.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(out.getvalue())


def test_an_error_text_of_grpc_that_is_not_text_has_no_traceback() -> None:
    """gRPC logs it as its own failure, although the call ends as it should."""
    out = io.StringIO()
    logs.configure("agent", "info", out)
    try:
        b"\xa1".decode()
    except UnicodeDecodeError:
        logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"\xa1")
        logging.getLogger("grpc._cython.cygrpc").exception("another failure")
    short, other = map(json.loads, out.getvalue().splitlines())
    assert (short["event"], short["level"]) == ("Invalid encoding on b'\\xa1'", "warning")
    assert "exception" not in short
    assert "UnicodeDecodeError" in other["exception"]


def test_a_line_without_log_setup_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    telemetry.logger().info("of_no_interest")
    telemetry.logger().warning("noteworthy", number=7)
    out, err = capsys.readouterr()
    assert out == ""
    assert [(line["event"], line["number"]) for line in map(json.loads, err.splitlines())] == [("noteworthy", 7)]
    assert not structlog.is_configured()
