"""A short run of every target with one seed, and each input that ever reproduced a finding."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.verification.fuzz import agent_sockets, calls, connections, loop_lag, sequences
from tests.verification.fuzz.agent_files import HEALTH, STATUS
from tests.verification.fuzz.loop_lag import bound_seconds
from tests.verification.fuzz.operator_files import TOKENS
from tests.verification.fuzz.records import good
from tests.verification.fuzz.runner import GROWTH_BYTES_MAX, Outcome, live_bytes, run
from tests.verification.fuzz.targets import Prepared, Target, all_targets
from tests.verification.fuzz.trace_files import SNAPSHOT

from cotenant.storage.v1 import records_pb2

TARGETS = {target.name: target for target in all_targets()}
SEED = 7
INPUTS = 20
CALLS = 48
IN_A_ROW = 80
DEEP = b'{"a":' * 3000
HUGE = b"1" + b"0" * 400
ENDLESS = b"9" * 5000
DAMAGED = (  # a certificate with a duplicate extension
    b"-----BEGIN CERTIFICATE-----\n"
    b"MIIBYjCCAQmgAwIBAgIUCYOfBb4QCbNczvj9kP2XkYloJTswCgYIKoZIzj0EAwIwDjEMMAoGA1UEAwwDbGFiMB4XDTI2MTEyMjEyNTM1"
    b"MVoXDTM2MTExOTEyNTg1MVowDjEMMAoGA1UEAwwDbGFiMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE4rzsW7z1kOSemQG0KXJCDREd"
    b"1JNpXyIDZxqlmBw7MOgxMLG3mJi95E+QAwQbyVltqmTua/Q8ahG9Ki4te+gfn6NFMEMwEgYDVR0TAQH/BAgwBgEB/wIBADAOBgNVHRMB"
    b"Af8EBAMCAQYwHQYDVR0OBBYEFHcS28oB5ErpzNd/7eZP2xw1GLUsMAoGCCqGSM49BAMCA0cAMEQCIDo9MWVWdwo0NJaJKS+v7nGyBjMb"
    b"NN1W15QFQ/w1pBOrAiAlJUjSmepve66NAWFdfOf4QAjkv6cLV315QnsDqxL/Bw=="
    b"\n-----END CERTIFICATE-----\n"
)


def state(**changes: object) -> bytes:
    return json.dumps({**STATUS, **changes}).encode()


def snapshot(path: str, value: object) -> bytes:
    """Return the valid snapshot with another value at a path such as `nodes.0.cores`."""
    whole = inner = json.loads(SNAPSHOT)
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    for step in way:
        inner = inner[step]
    inner[last] = value
    return json.dumps(whole).encode()


def held(memory_bytes: int = 5, milli: int = 500) -> bytes:
    """Return an attempt record with other amounts."""
    record = records_pb2.StoredAttempt.FromString(good("attempt"))
    task = record.attempt.allocations[0].tasks[0]
    task.memory_bytes, task.gpus[0].milli = memory_bytes, milli
    return record.SerializeToString()


def node(memory_bytes: int) -> bytes:
    """Return a node record with another amount."""
    record = records_pb2.StoredNode.FromString(good("node"))
    record.node.inventory.memory_bytes = memory_bytes
    return record.SerializeToString()


def claim(**changes: object) -> bytes:
    """Return another agent's claim with other values."""
    whole = {"node_id": "b", "state_dir": "/b", "pid": 8, "cpus": [2], "memory_bytes": 5, "machine_memory_bytes": 9}
    return json.dumps({**whole, **changes}).encode()


CPUS_OF_NOBODY: tuple[object, ...] = ([{}], None, [10**400])
FOUND = [
    ("settings", b"nodes = " + ENDLESS),
    ("settings", b"a = " + b"[" * 3000),
    ("failure rules", b"version = " + ENDLESS),
    ("client settings", b"\xde"),
    ("client settings", b"state_dir = '~nobody-of-this-name/x'"),
    ("client settings", b"[tls]\nca = '~nobody-of-this-name/x'"),
    ("cluster option", b"9" * 300),
    ("token", b"\xfe"),
    ("endpoint.json", DEEP),
    ("tokens.json", TOKENS[0].replace(b"1.5", HUGE)),
    ("audit log", DEEP),
    ("backups", b'{"cotenant_backup":1,"revision":Infinity,"keys":0}\n{"sha256":""}\n'),
    ("backups", b'{"cotenant_backup":1,"revision":1,"keys":1}\n{"k":"\\ud800","v":""}\n{"sha256":""}\n'),
    ("backups", DEEP),
    ("snapshot", SNAPSHOT.replace(b"1000.0", HUGE)),
    ("snapshot", SNAPSHOT.replace(b"1000.0", ENDLESS)),
    ("snapshot", snapshot("nodes.0.memory_bytes", 2**64)),
    ("snapshot", snapshot("nodes.0.shareable", False)),
    ("snapshot", snapshot("nodes.0.gpus", 2**31)),
    ("snapshot", snapshot("jobs.0.held.0.shares", [[99, 500]])),
    ("progress datagram", b'{"step": ' + HUGE + b"}"),
    ("progress datagram", b'{"loss": ' + HUGE + b"}"),
    ("supervisor datagram", state(number=float("inf"))),
    ("supervisor datagram", state(message="\ud800")),
    ("supervisor datagram", DEEP),
    *(("state.json", state(**{name: value})) for name in ("time", "cpu_seconds") for value in (float("nan"), 1e308)),
    *(("state.json", state(**{name: 2**64})) for name in ("number", "epoch", "memory_peak_bytes", "pid")),
    ("state.json", state(end_time=float("nan"))),
    ("narrowed", b'{"0": [Infinity]}'),
    ("throttle", b'{"bandwidth_percent": Infinity, "cores": 1, "idle": false, "suspended": false}'),
    ("boot", b"\xd3"),
    ("health.json", HEALTH.replace(b"5.0", HUGE)),
    ("health.json", DEEP),
    ("stop.json", b"true"),
    ("stop.json", b'{"grace_seconds": ""}'),
    ("stop.json", b'{"grace_seconds": NaN}'),
    ("stop.json", b'{"grace_seconds": ' + HUGE + b"}"),
    ("stop.json", DEEP),
    *((f"{kind} record", b"\xff\xff") for kind in ("job", "tenant", "node", "attempt", "request")),
    ("job record", b"\x08\x01\x12\x03\x0a\x01x"),  # without a phase
    ("job record", b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),  # of a schema below the first
    ("tenant record", b"\x08\x01\x12\x03\x0a\x01y"),  # another name than its key
    ("attempt record", b"\x08\x01\x12\x03\x0a\x01x"),  # without a state
    *(("attempt record", held(memory_bytes)) for memory_bytes in (-(2**31), -(2**63))),
    *(("attempt record", held(milli=milli)) for milli in (-1000, -(2**31))),
    *(("node record", node(memory_bytes)) for memory_bytes in (-1, -(2**63))),
    ("provider keys", b'{"keys":' * 3000),
    ("provider tokens", b"W1tb" * 1500 + b".e30.x"),
    ("certificates", DAMAGED.replace(b"mgAwIBAgIU", b"mgAwIBagIU", 1)),
    ("certificates", DAMAGED),
    ("environment", b"HOME=~"),
    ("environment", b"COTENANT_STATE_DIR=~nobody-of-this-name/x"),
    ("blend weights", b'{"ann": [[[0, 0, 0], [-1e300, 0, 1e300], [0, 0, 0]], [0, 0], 5]}'),
    ("blend weights", b'{"": [[[]], [0.3], Infinity]}'),
    ("cached runs", b'{"key": "a", "processor_seconds": ' + HUGE + b', "values": {}, "series": {}}'),
    ("history", b'""'),
    ("provider answers", b"HTTP/1.1 302 \nLocation:\nContent-Length:9223372036854775807\n\n"),
    ("lease", b"1e309 1e309"),
    ("measured rates", b'\0{"profiles":[{"setting":["","",1],"stale":"\\ud800","rates":[[1,1,4,[2]]]}]}'),
    ("model of history", b'\0{"key":["ann","bert","2000","2"],"runs":[],"rates":[["",1,[]],["",2,[8]]]}'),
    ("job classes", b'\0{"key":["","",2147483648,"2"],"model":"","name":"","seconds":0}'),
    (
        "recording",
        b'{"kind": "header", "version": 1, "scenario": {"trace": "' + b"9" * 300 + b'", "cluster": "6"}, '
        b'"files": {"trace": "ab", "cluster": "cd"}, "ons": {}}\n',
    ),
    ("spec", b"\xdb\x05commandl\xff\xff\xff\x7f"),
    *(("sockets.path", data) for data in (b"", b"/", b"\x00", b"\x85")),
    *(("machine claim", claim(cpus=value)) for value in CPUS_OF_NOBODY),
    *(("machine claim", claim(memory_bytes=value)) for value in ("", None, 10**400)),
    ("machine claim", claim(state_dir="\ud800", node_id="a")),
    ("machine claim", DEEP),
    *(("agent settings", data) for data in (b"", b"1", DEEP, b'{"config": 1, "tls": null}', b'{"tls": [1]}')),
    *(("agent answer", data + b"\n") for data in (b"", b"[]", b"\x85", b'{"a": 1}', DEEP)),
    *(("identity.json", data) for data in (b'{"only_user": null}', b'{"only_user": true}', DEEP)),
    *(("spec parts", data) for data in (b"", b"x")),
    ("divided record", b"x" * 9000),
    *((f"{kind} of an older store", data) for kind in ("job", "attempt") for data in (b"\xff\xff", b"")),
    ("stored attempt name", "x-\u00b2".encode()),
]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep other tests' garbage out of deep recursion: a finalizer that runs there raises RecursionError unseen."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def shown(outcome: Outcome) -> str:
    return "\n".join(map(str, outcome.findings))


@pytest.mark.parametrize("name", TARGETS)
def test_input_is_accepted_or_refused_with_a_message(name: str, tmp_path: Path) -> None:
    outcome = run(TARGETS[name], INPUTS, SEED, tmp_path)
    assert not outcome.findings, shown(outcome)


@pytest.mark.parametrize(("name", "data"), FOUND, ids=lambda part: part if isinstance(part, str) else "")
def test_past_findings_stay_fixed(name: str, data: bytes, tmp_path: Path) -> None:
    target, packed = TARGETS[name], gzip.compress(data) if name == "backups" else data

    def prepare(directory: Path) -> Prepared:
        return Prepared(target.prepare(directory).run, (packed,))

    with collector_paused():
        outcome = run(Target(name, prepare, target.errors), 0, SEED, tmp_path)
    assert not outcome.findings, shown(outcome)


@pytest.mark.parametrize("name", calls.NAMES)
def test_calls_are_answered_or_refused_with_a_message(name: str, tmp_path: Path) -> None:
    outcome = calls.run(name, CALLS, SEED, tmp_path)
    assert not outcome.findings, shown(outcome)


def test_measuring_memory_is_not_counted_as_loop_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def slow() -> int:
        begun = time.thread_time()
        while time.thread_time() - begun < 2 * bound_seconds():
            pass
        return 0

    monkeypatch.setattr(calls, "live_bytes", slow)
    calls.run("unary calls", 2 * CALLS, SEED, tmp_path)
    assert "held the loop" not in capfd.readouterr().err


async def test_a_slow_callback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "is_too_long", lambda seconds: seconds > bound_seconds)
    lag, bound_seconds = loop_lag.LoopLag(), 0.02

    async def spins() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < 2 * bound_seconds:
            pass

    with lag.watching():
        await asyncio.create_task(spins())
        await asyncio.sleep(0)
    assert "spins" in lag.finding()


def test_unknown_tls_clients_receive_nothing_and_valid_ones_are_served(tmp_path: Path) -> None:
    outcome = connections.run(connections.NAME, CALLS, SEED, tmp_path)
    assert not outcome.findings, shown(outcome)


def test_an_agent_under_a_flood_of_datagrams_keeps_its_heartbeats(tmp_path: Path) -> None:
    outcome = agent_sockets.run(agent_sockets.NAME, CALLS, SEED, tmp_path)
    assert not outcome.findings, shown(outcome)


def test_acknowledged_jobs_end_after_any_sequence_of_calls(tmp_path: Path) -> None:
    outcome = sequences.run(sequences.NAME, IN_A_ROW, SEED, tmp_path)
    assert not outcome.findings, shown(outcome)


def test_a_failure_is_found_and_its_input_minimized(tmp_path: Path) -> None:
    def fails(data: bytes) -> None:
        assert b"7" not in data

    [finding] = run(Target("faulty", lambda directory: Prepared(fails, (b"1 2 3",))), 500, SEED, tmp_path).findings
    assert finding.data == b"7"
    assert finding.what.startswith("AssertionError")


def computes(data: bytes) -> None:
    while data.startswith(b"x"):
        pass


def waits(data: bytes) -> None:
    reader, writer = os.pipe()
    try:
        os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("hangs", "seconds_max", "what"),
    [(computes, 1.0, "more than 1 s of CPU time"), (waits, 0.05, "more than 0.3 s")],  # a busy machine computes slowly
)
def test_a_hang_is_found(hangs: Callable[[bytes], None], seconds_max: float, what: str, tmp_path: Path) -> None:
    target = Target("slow", lambda directory: Prepared(hangs, (b"x",)), seconds_max=seconds_max)
    outcome = run(target, 0, SEED, tmp_path)
    assert [finding.what for finding in outcome.findings] == [f"a valid input: hung: {what}"]


LEAKED_BYTES, LEAKS = 16 << 10, 3_000
C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)


def leaks(data: bytes) -> None:
    """Allocate memory with C's malloc, write to it, and lose it."""
    ctypes.memset(C.malloc(LEAKED_BYTES), 1, LEAKED_BYTES)


def leaves_garbage(data: bytes) -> None:
    """Allocate at least as much in a reference cycle, which garbage collection frees."""
    circle: list[object] = [bytearray(LEAKED_BYTES), [b"%d" % number for number in range(300)]]
    circle.append(circle)


@pytest.mark.parametrize(("run_one", "grows"), [(leaks, True), (leaves_garbage, False)])
def test_a_memory_leak_is_found_and_garbage_is_not(
    run_one: Callable[[bytes], None], grows: bool, tmp_path: Path
) -> None:
    outcome = run(Target("grows", lambda directory: Prepared(run_one, (b"x",))), LEAKS, SEED, tmp_path)
    assert (outcome.grown_bytes > GROWTH_BYTES_MAX) is grows


@pytest.mark.parametrize(
    # A little more than asserted: elsewhere in the process a few bytes may be freed in between.
    "allocated",
    [lambda: C.malloc(9 << 20), lambda: [b"%d" % number for number in range(300_000)]],
)
def test_live_bytes_include_c_and_python_allocations(allocated: Callable[[], object]) -> None:
    before = live_bytes()
    kept = allocated()
    grown = live_bytes() - before
    if isinstance(kept, int):
        C.free(ctypes.c_void_p(kept))
    assert 8 << 20 <= grown < 32 << 20


def test_freed_memory_held_by_the_process_is_not_live() -> None:
    before = live_bytes()
    many = [bytes(200) for _ in range(200_000)]
    few = many[::500]
    del many
    assert live_bytes() - before < 1 << 20
    assert len(few) == 400
