"""Bytes from a server to the client of quick commands: an answer, an error, or a call that is left to gRPC."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import pack

import grpc
from tests.verification.fuzz.targets import Prepared, Target

from cotenant.cli.unary_stubs import NotUnary, UnaryStub, run_unary
from cotenant.rpc.unary_client import UnaryClient
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["JobService"]
SETTINGS, HEADERS, DATA, PING, GOAWAY, RST_STREAM = 4, 1, 0, 6, 7, 3
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
WORDS = (
    b"grpc-status",
    b"grpc-message",
    b"\x00\x03a-b\x01",
    b"\xff\xff\xff\xff\x7f",
    b"\x7f\x80\x80\x80\x80\x01",
    b"%",
)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("server answers", _answers, (grpc.aio.AioRpcError,))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Return a literal header that no table remembers."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def _seeds() -> Iterator[bytes]:
    answer = pb.GetJobResponse(job=job_pb2.Job(id="0t6czcnzd6ed", spec=job_pb2.JobSpec(command=["true"])))
    message = answer.SerializeToString()
    opening = frame(SETTINGS, 0, 0, pack(">HIHI", 0xFE03, 1, 5, 16_384)) + frame(SETTINGS, ACK, 0, b"")
    start = b"\x20\x88" + header(b"content-type", b"application/grpc")
    end = frame(HEADERS, END_HEADERS | END_STREAM, 1, header(b"grpc-status", b"0"))
    body = frame(DATA, 0, 1, b"\0" + pack(">I", len(message)) + message)
    yield opening + frame(HEADERS, END_HEADERS, 1, start) + body + end
    refused = header(b"grpc-status", b"5") + header(b"grpc-message", b"no job %22x%22")
    refused += header(b"grpc-status-details-bin", b"\0\x08\x05") + header(b"grpc-retry-pushback-ms", b"-1")
    yield opening + frame(PING, 0, 0, bytes(8)) + frame(HEADERS, END_HEADERS | END_STREAM, 1, start + refused)
    yield opening + frame(GOAWAY, 0, 0, bytes(8)) + frame(RST_STREAM, 0, 1, bytes(4))


def _answers(directory: Path) -> Prepared:
    listening = socket.create_server(("127.0.0.1", 0))
    answers: list[bytes] = []

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(answers.pop())
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass

    threading.Thread(target=serve, daemon=True).start()
    host, port = listening.getsockname()

    def run(data: bytes) -> None:
        answers.append(data)
        client = UnaryClient(host, port)
        try:
            answer = run_unary(UnaryStub(client, "token", SERVICE, None).GetJob(pb.GetJobRequest(id="0t6czcnzd6ed")))
        except NotUnary:
            return  # gRPC makes the call instead
        finally:
            client.close()
        if not isinstance(answer, pb.GetJobResponse):
            raise AssertionError("not the answer of this method")

    return Prepared(run, tuple(_seeds()), WORDS)
