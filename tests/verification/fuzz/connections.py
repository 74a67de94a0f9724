"""Bytes to a TLS port: damaged or truncated handshakes, unknown clients, and damaged HTTP/2 over TLS.

A client without a certificate of the authority receives nothing; clients with a valid one are served before, during and
after.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.unit.services.mesh import again
from tests.verification.fuzz.calls import LogFindings
from tests.verification.fuzz.mutator import Mutator
from tests.verification.fuzz.runner import FINDINGS_MAX, SETTLED_SHARE, Finding, Outcome, memory_bytes

from cotenant.rpc.channel import connect
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.security.certificates import Authority, Issued
from cotenant.security.credentials import Credentials
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.v1 import policy_service_pb2, policy_service_pb2_grpc

NAME = "invalid TLS"
AT_ONCE = 32
ANSWER_SECONDS = 0.25
PROBE_EVERY = 8  # rounds
LEAKED_DESCRIPTORS_MAX = 3 * AT_ONCE  # descriptors, more than after memory had settled
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
HEADERS = (
    b"\x83\x86\x00\x05:path\x27/cotenant.v1.PolicyService/ListPolicies"
    b"\x00\x0a:authority\x03x:1\x00\x02te\x08trailers\x00\x0ccontent-type\x10application/grpc"
)
CALL = PREFACE + len(HEADERS).to_bytes(3, "big") + b"\x01\x04\x00\x00\x00\x01" + HEADERS + b"\x00\x00\x05\x00\x01"
CALL += b"\x00\x00\x00\x01" + bytes(5)


def run(
    name: str, inputs: int, seed: int | str, directory: Path, watch: Callable[[Outcome], None] = lambda outcome: None
) -> Outcome:
    """Open a number of connections."""
    outcome = Outcome(name)
    with LogFindings(outcome).listening():
        asyncio.run(_Fuzzing(outcome, Random(f"{name} {seed}"), directory).run(inputs, watch))
    return outcome


class _Fuzzing:
    def __init__(self, outcome: Outcome, rng: Random, directory: Path) -> None:
        self.outcome, self.rng = outcome, rng
        ours, others = Authority(directory / "ours"), Authority(directory / "others")
        for authority in (ours, others):
            authority.create()
        served = ours.issue(Subject.parse("service/queue"), ["127.0.0.1"])
        eve = Subject.parse("user/eve?tenants=lab")
        self.shown = TlsFiles(ours.cert_path, (mine := ours.issue(eve)).path, mine.key_path)
        self.security = Security(
            Credentials("mesh"), WatchedTlsFiles(TlsFiles(ours.cert_path, served.path, served.key_path))
        )
        self.known, self.foreign, self.anonymous = _context(mine), _context(others.issue(eve)), _context(None)
        self.hello = Mutator(rng, (_hello(self.known),))
        self.inside = Mutator(rng, (CALL,))
        self.port = 0

    async def run(self, inputs: int, watch: Callable[[Outcome], None]) -> None:
        server = Server("127.0.0.1:0", security=self.security)
        serve_policies(server)
        self.port = await server.start()
        begun, rounds, settled, open_then = time.monotonic(), 0, 0, 0
        async with connect(f"127.0.0.1:{self.port}", tls=self.shown) as channel:
            self.stub: Any = policy_service_pb2_grpc.PolicyServiceStub(channel)
            await self._probe()
            while self.outcome.inputs < inputs and len(self.outcome.findings) < FINDINGS_MAX:
                some = min(AT_ONCE, inputs)
                await asyncio.gather(*(self._one() for _ in range(some)))
                self.outcome.inputs, rounds = self.outcome.inputs + some, rounds + 1
                if not settled and self.outcome.inputs >= inputs * SETTLED_SHARE:
                    settled, open_then = memory_bytes(), _open_files()
                if not rounds % PROBE_EVERY:
                    await self._probe()
                    self.outcome.seconds = time.monotonic() - begun
                    watch(self.outcome)
            await self._probe()
            self.outcome.seconds = time.monotonic() - begun
            self.outcome.grown_bytes = memory_bytes() - settled if settled else 0
            if inputs > LEAKED_DESCRIPTORS_MAX and _open_files() > open_then + LEAKED_DESCRIPTORS_MAX:
                self._finding(f"{_open_files() - open_then} leaked descriptors")
        await server.stop(0)

    async def _probe(self) -> None:
        """Check that a valid client is served."""
        try:
            request = policy_service_pb2.ListPoliciesRequest()
            await again(lambda: self.stub.ListPolicies(request, timeout=20, wait_for_ready=True))
        except Exception as error:
            self._finding(f"a valid client is not served: {type(error).__name__} {str(error)[:200]}")

    async def _one(self) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:  # it accepts nothing for a moment: the probe checks that it recovers
            self.outcome.refused += 1
            return
        kind = self.rng.choice((self._hello, self._flight, self._inside, self._not_known))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await kind(reader, writer)
        except (OSError, ssl.SSLError, EOFError, TimeoutError):
            self.outcome.refused += 1
        finally:
            writer.transport.abort()

    async def _hello(self, reader: Any, writer: Any) -> None:
        """Send a damaged ClientHello."""
        writer.write(self.hello.draw())
        if self.rng.random() < 0.3:
            writer.write_eof()
        await writer.drain()
        await self._heard_a_little(reader)

    async def _flight(self, reader: Any, writer: Any) -> None:
        """Handshake up to a flight that is damaged or truncated."""
        flight = self.rng.randrange(3)

        def damage(number: int, data: bytes) -> bytes:
            return Mutator(self.rng, (data,)).draw() if number == flight else data

        await _TlsClient(self.known, reader, writer, damage).shake()
        await self._heard_a_little(reader)

    async def _inside(self, reader: Any, writer: Any) -> None:
        """Authenticate, then send invalid HTTP/2."""
        client = _TlsClient(self.known, reader, writer)
        await client.shake()
        await client.say(self.inside.draw())
        await self._heard_a_little(reader)

    async def _not_known(self, reader: Any, writer: Any) -> None:
        """Make a valid call without a certificate, or with another authority's."""
        client = _TlsClient(self.rng.choice((self.foreign, self.anonymous)), reader, writer)
        await client.shake()
        await client.say(CALL)
        if heard := await client.hear():
            self._finding(f"an unknown client receives {heard[:60]!r}")

    async def _heard_a_little(self, reader: Any) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1 << 16), self.rng.choice((0.0, 0.002, 0.02)))

    def _finding(self, what: str) -> None:
        if all(finding.what != what for finding in self.outcome.findings):
            self.outcome.findings.append(Finding(self.outcome.target, what, b""))


class _TlsClient:
    """A TLS client whose flights can be changed on their way."""

    def __init__(
        self, context: ssl.SSLContext, reader: Any, writer: Any, change: Callable[[int, bytes], bytes] | None = None
    ) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out)
        self._reader, self._writer, self._change, self._flights = reader, writer, change, 0

    async def shake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return await self._send()
            except ssl.SSLWantReadError:
                await self._send()
            await self._receive()

    async def say(self, data: bytes) -> None:
        if data:
            self._tls.write(data)
        await self._send()

    async def hear(self) -> bytes:
        """Return the next bytes received; b"" at the end."""
        while True:
            try:
                return self._tls.read(1 << 16)
            except ssl.SSLWantReadError:
                await self._receive()
            except ssl.SSLError:
                return b""

    async def _send(self) -> None:
        if data := self._out.read():
            self._writer.write(self._change(self._flights, data) if self._change else data)
            self._flights += 1
            await self._writer.drain()

    async def _receive(self) -> None:
        data = await self._reader.read(1 << 16)
        if not data:
            raise EOFError
        self._in.write(data)


def _context(issued: Issued | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if issued:
        context.load_cert_chain(issued.path, issued.key_path)
    return context


def _hello(context: ssl.SSLContext) -> bytes:
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
