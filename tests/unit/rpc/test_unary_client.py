"""Unary calls without the gRPC library, to real servers and to others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import pack

import pytest
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.core.model.job import JobSpec
from cotenant.rpc.endpoints import host_and_port
from cotenant.rpc.unary_client import REQUEST_BYTES_MAX, TimedOut, UnaryClient, Unsupported, decode_headers
from cotenant.v1.job_service_pb2 import GetJobRequest, ListJobsRequest, ListJobsResponse

LIST, GET = "/cotenant.v1.JobService/ListJobs", "/cotenant.v1.JobService/GetJob"
METADATA = (("authorization", f"Bearer {TOKEN}"),)


@pytest.fixture
def standin() -> Iterator[Standin]:
    made = Standin()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def client(standin: Standin) -> Iterator[UnaryClient]:
    made = UnaryClient(*host_and_port(standin.address))
    yield made
    made.close()


def test_calls_share_a_connection_and_return_whole_messages(standin: Standin, client: UnaryClient) -> None:
    for number in range(300):
        standin.call(standin.jobs.add, JobSpec(name=f"job-{number:03}" + "x" * 200, command=("true",)))
    for _ in range(3):
        answer = client.call(LIST, ListJobsRequest(page_size=1000).SerializeToString(), METADATA, 10.0)
        assert (answer.status, answer.details) == (0, "")
        assert len(ListJobsResponse.FromString(answer.message).jobs) == 300


def test_an_error_has_its_message_and_its_details(client: UnaryClient) -> None:
    answer = client.call(GET, GetJobRequest(id="a % ünknown").SerializeToString(), METADATA, 10.0)
    assert answer.status == 5
    assert "a % \\xfcnknown" in answer.details
    assert b"JOB_NOT_FOUND" in dict(answer.trailers)["grpc-status-details-bin"]


def test_a_call_without_the_token_is_refused(client: UnaryClient) -> None:
    assert client.call(LIST, b"", (), 10.0).status == 16


def test_an_unknown_method_is_unimplemented(client: UnaryClient) -> None:
    assert client.call("/cotenant.v1.JobService/NoSuchMethod", b"", METADATA, 10.0).status == 12


def test_a_large_request_is_left_to_the_library(client: UnaryClient) -> None:
    with pytest.raises(Unsupported):
        client.call(LIST, b"x" * (REQUEST_BYTES_MAX + 1), METADATA, 10.0)


def test_a_refused_connection_is_left_to_the_library() -> None:
    with pytest.raises(Unsupported):
        UnaryClient("127.0.0.1", 1).call(LIST, b"", (), 10.0)


@contextmanager
def peer(answer: Callable[[socket.socket], None]) -> Iterator[UnaryClient]:
    """A server that reads something, and then does as `answer` says until the client has gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                answer(connection)
                while connection.recv(65_536):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = UnaryClient(*listening.getsockname())
        yield client
        client.close()
        thread.join(10)
        assert not thread.is_alive()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + pack(">I", stream) + payload


C_CORE = frame(4, 0, 0, pack(">HI", 0xFE03, 1))
HEAD = frame(1, 4, 1, b"\x88")
MESSAGE = frame(0, 0, 1, b"\0" + pack(">I", 2) + b"ab")
ENDED = frame(1, 5, 1, b"\0\x0bgrpc-status\x010")


def test_pings_are_answered_and_other_frames_are_skipped() -> None:
    pong: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        connection.sendall(C_CORE + frame(6, 0, 0, b"12345678") + frame(8, 0, 0, pack(">I", 5)))
        connection.settimeout(60)
        received = b""
        while not received.endswith(b"12345678"):
            received += connection.recv(1)
        pong.append(received[-17:])
        connection.sendall(HEAD + MESSAGE + ENDED)

    with peer(answer) as client:
        assert client.call(LIST, b"", (), 10.0).message == b"ab"
    assert pong == [frame(6, 1, 0, b"12345678")]


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + MESSAGE + ENDED,  # no settings of the C core
        C_CORE + frame(1, 5, 1, b"\x8d"),  # 404 without a status of gRPC
        C_CORE + frame(1, 5, 1, b"\xbe"),  # a dynamic table
        C_CORE + frame(1, 5, 1, b"\0\x8bgrpc-status\x010"),  # the Huffman code
        C_CORE + HEAD + frame(0, 0, 1, b"\x01" + pack(">I", 2) + b"ab") + ENDED,  # compressed
        C_CORE + HEAD + frame(0, 0, 1, b"\0" + pack(">I", 3) + b"ab") + ENDED,  # cut
        C_CORE + HEAD + ENDED,  # no message
        C_CORE + frame(3, 0, 1, pack(">I", 8)),  # cancelled
        C_CORE + frame(7, 0, 0, pack(">II", 0, 0)),  # going away
        C_CORE + frame(1, 1, 1, b"\x88"),  # split headers
        C_CORE + frame(1, 5, 1, b"\0\x0bgrpc-status\x05"),  # a cut header
        C_CORE + frame(1, 5, 1, b"\x88\0\x0bgrpc-status\x0299"),  # an unknown status
        C_CORE + frame(1, 5, 1, b"\0\x7f" + b"\xff" * 100_000 + b"\x01"),  # a long integer
        C_CORE + frame(4, 0, 0, b"cut"),  # cut settings
    ],
)
def test_an_answer_that_is_not_understood_is_left_to_the_library(sent: bytes) -> None:
    with peer(lambda connection: connection.sendall(sent)) as client, pytest.raises(Unsupported):
        client.call(LIST, b"", (), 10.0)


def test_a_server_of_http_1_is_left_to_the_library() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)

    with peer(answer) as client, pytest.raises(Unsupported):
        client.call(LIST, b"", (), 10.0)


def test_a_closed_connection_is_left_to_the_library() -> None:
    with (
        peer(lambda connection: connection.shutdown(socket.SHUT_WR)) as client,
        pytest.raises(Unsupported, match="closed"),
    ):
        client.call(LIST, b"", (), 10.0)


def test_without_an_answer_the_deadline_passes() -> None:
    with peer(lambda connection: connection.sendall(C_CORE + HEAD)) as client, pytest.raises(TimedOut):
        client.call(LIST, b"", (), 0.05)


def test_long_literals_are_read() -> None:
    value = b"v" * 1000
    assert decode_headers(b"\x40\x01n\x7f\xe9\x06" + value + b"\x5f\x7f\xe9\x06" + value) == [("n", value), ("", value)]
