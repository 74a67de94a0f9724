"""A client for unary gRPC calls over one plain connection, without the gRPC library.

Theory of operation. Importing the library and opening a channel takes longer than a whole command; a unary call is only
a few HTTP/2 frames (RFC 9113, and gRPC's PROTOCOL-HTTP2.md). The client speaks to the same port as every other client,
with the same token, so authentication, roles, limits, audit and routing are the server's own. It understands only what
gRPC's C core answers to the settings below: no header table, and metadata as raw bytes (setting 0xfe03), so that
headers need no Huffman code. Anything else, from a refused connection to a proxy in between, raises `Unsupported`: the
caller then makes the same call through the library, which retries, explains and reports as always. Repeating the call
does no harm, because only methods that may be retried are called here.
"""

from __future__ import annotations

import socket
import struct
import time
from binascii import a2b_base64
from collections.abc import Iterable, Iterator
from struct import pack, unpack_from
from typing import Any, NamedTuple

REQUEST_BYTES_MAX = 32_768  # below the window of 65,535 bytes that every server grants, so nothing waits for more
ANSWER_BYTES_MAX = 64 << 20
CONNECT_SECONDS_MAX = 0.5  # the library has more patience
FRAME_BYTES_MAX = 2**24 - 1
WINDOW_MAX = 2**31 - 1
WINDOW_DEFAULT = 65_535

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, TRUE_BINARY_METADATA = 1, 2, 4, 5, 0xFE03
STATUS_INDICES = {8: "200", 9: "204", 10: "206", 11: "304", 12: "400", 13: "404", 14: "500"}  # RFC 7541, appendix A
STATIC_INDEX_MAX = 61
INTEGER_BITS_MAX = 35
STATUS_MAX = 16  # UNAUTHENTICATED

Headers = list[tuple[str, bytes]]


class Unsupported(Exception):
    """The call cannot be made here; the outcome of a call that was sent is unknown."""


class TimedOut(Exception):
    """The deadline has passed without an answer."""


class Answer(NamedTuple):
    """The answer to a call: the message if `status` is 0, and the trailers."""

    status: int
    details: str
    trailers: tuple[tuple[str, str | bytes], ...]
    message: bytes


class UnaryClient:
    """One connection to a server; calls are made one after the other."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._next_stream = 1
        self._sends_raw_metadata = False

    def call(self, path: str, request: bytes, metadata: Iterable[tuple[str, str]], timeout_seconds: float) -> Answer:
        """Return the answer of a method.

        Raises:
            Unsupported: the connection failed, or the answer is not one that this client understands.
            TimedOut: there was no answer in time.
        """
        if len(request) > REQUEST_BYTES_MAX:
            raise Unsupported("the request is large")
        deadline = time.monotonic() + timeout_seconds
        try:
            opening = b"" if self._socket else self._open()
            stream, self._next_stream = self._next_stream, self._next_stream + 2
            headers = _request_headers(self._address, path, metadata, timeout_seconds)
            assert self._socket
            self._socket.sendall(
                opening
                + _frame(HEADERS, END_HEADERS, stream, headers)
                + _frame(DATA, END_STREAM, stream, b"\0" + pack(">I", len(request)) + request)
            )
            return self._answer(stream, deadline)
        except TimeoutError:
            raise TimedOut from None
        except (OSError, IndexError, ValueError, struct.error) as error:
            raise Unsupported(str(error)) from error

    def close(self) -> None:
        """Close the connection."""
        if self._socket:
            self._socket.close()
            self._socket = None

    def _open(self) -> bytes:
        """Connect, and return what the client sends first."""
        try:
            host, port = self._address
            # As bytes, or Python loads its codec for international names.
            address: Any = host.encode("ascii"), port
            self._socket = socket.create_connection(address, CONNECT_SECONDS_MAX)
        except TimeoutError:
            raise Unsupported("no connection") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wanted = (
            (HEADER_TABLE_SIZE, 0),
            (ENABLE_PUSH, 0),
            (INITIAL_WINDOW_SIZE, WINDOW_MAX),
            (MAX_FRAME_SIZE, FRAME_BYTES_MAX),
            (TRUE_BINARY_METADATA, 1),
        )
        settings = b"".join(pack(">HI", name, value) for name, value in wanted)
        window = pack(">I", WINDOW_MAX - WINDOW_DEFAULT)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        return preface + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window)

    def _answer(self, stream: int, deadline: float) -> Answer:
        """Read frames until the stream ends."""
        body = bytearray()
        found: Headers = []
        received_bytes = 0
        while True:
            kind, flags, of_stream, payload = self._read_frame(deadline)
            if kind == SETTINGS and not flags & ACK:
                self._accept_settings(payload)
            elif kind == PING and not flags & ACK:
                self._send(_frame(PING, ACK, 0, payload))
            elif kind == GOAWAY:
                raise Unsupported("the server closes the connection")
            elif of_stream == stream and kind == RST_STREAM:
                raise Unsupported("the server has cancelled the call")
            elif of_stream == stream and kind in (HEADERS, DATA):
                if flags & (PADDED | PRIORITY) or (kind == HEADERS and not flags & END_HEADERS):
                    raise Unsupported("padded or split frames")
                if kind == DATA:
                    body += payload
                else:
                    found += decode_headers(payload)
                if flags & END_STREAM:
                    return self._ended(found, bytes(body))
            received_bytes += len(payload)
            if received_bytes > ANSWER_BYTES_MAX:
                raise Unsupported("the answer is too large")

    def _ended(self, found: Headers, body: bytes) -> Answer:
        named = dict(found)
        if not self._sends_raw_metadata or named.get(":status") != b"200" or "grpc-status" not in named:
            raise Unsupported("not an answer of gRPC's C core")
        if not 0 <= (status := int(named["grpc-status"])) <= STATUS_MAX:
            raise Unsupported("an unknown status")
        details = _percent_decoded(named.get("grpc-message", b""))
        trailers = tuple((name, _metadata_value(name, value)) for name, value in found if not name.startswith(":"))
        if status:
            return Answer(status, details, trailers, b"")
        if len(body) < 5 or body[0] or unpack_from(">I", body, 1)[0] != len(body) - 5:
            raise Unsupported("not one uncompressed message")
        return Answer(0, details, trailers, body[5:])

    def _accept_settings(self, payload: bytes) -> None:
        settings = dict(unpack_from(">HI", payload, place) for place in range(0, len(payload), 6))
        self._sends_raw_metadata = settings.get(TRUE_BINARY_METADATA) == 1
        self._send(_frame(SETTINGS, ACK, 0, b""))

    def _send(self, data: bytes) -> None:
        assert self._socket
        self._socket.sendall(data)

    def _read_frame(self, deadline: float) -> tuple[int, int, int, bytes]:
        """Return the type, the flags, the stream and the payload of the next frame."""
        head = self._read(9, deadline)
        length = int.from_bytes(head[:3], "big")
        return head[3], head[4], int.from_bytes(head[5:], "big") & WINDOW_MAX, self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._socket
        while len(self._received) < count:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError
            self._socket.settimeout(left_seconds)
            data = self._socket.recv(65_536)
            if not data:
                raise Unsupported("the connection was closed")
            self._received += data
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + pack(">I", stream) + payload


def _request_headers(
    address: tuple[str, int], path: str, metadata: Iterable[tuple[str, str]], timeout_seconds: float
) -> bytes:
    """Return the header block of a request: literals that no table remembers."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", f"{host}:{address[1]}"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("grpc-timeout", f"{round(timeout_seconds * 1000)}m"),
        *metadata,
    )
    return b"".join(b"\0" + _string(name.encode()) + _string(value.encode()) for name, value in headers)


def _string(text: bytes) -> bytes:
    """Return a string literal: its length in an integer with a prefix of 7 bits, then the bytes."""
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    length -= 0x7F
    encoded = bytearray((0x7F,))
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + text


def decode_headers(block: bytes) -> Headers:
    r"""Return the headers of a block; names that only the static table has are "", except for the status.

    >>> decode_headers(b"\x20\x88\x00\x0bgrpc-status\x010")
    [(':status', b'200'), ('grpc-status', b'0')]

    Raises:
        Unsupported: the block needs a dynamic table or the Huffman code.
    """
    return list(_decoded_headers(block))


def _decoded_headers(block: bytes) -> Iterator[tuple[str, bytes]]:
    place = 0
    while place < len(block):
        first = block[place]
        if first & 0x80:  # an indexed field
            index, place = _integer(block, place, 7)
            yield _indexed(index)
        elif first & 0xE0 == 0x20:  # the size of the dynamic table
            _, place = _integer(block, place, 5)
        else:  # a literal, with or without indexing: nothing fits into a table of size 0
            index, place = _integer(block, place, 6 if first & 0x40 else 4)
            if index:
                name = _indexed(index)[0]
            else:
                encoded, place = _read_string(block, place)
                name = encoded.decode()
            value, place = _read_string(block, place)
            yield name, value


def _indexed(index: int) -> tuple[str, bytes]:
    if not 0 < index <= STATIC_INDEX_MAX:
        raise Unsupported("a dynamic header table")
    return (":status", STATUS_INDICES[index].encode()) if index in STATUS_INDICES else ("", b"")


def _integer(block: bytes, place: int, bits: int) -> tuple[int, int]:
    """Return an integer with a prefix of some bits, and the place after it."""
    most = (1 << bits) - 1
    value, place = block[place] & most, place + 1
    if value < most:
        return value, place
    shift = 0
    while True:
        part, place = block[place], place + 1
        value += (part & 0x7F) << shift
        shift += 7
        if shift > INTEGER_BITS_MAX:
            raise Unsupported("a long integer")
        if not part & 0x80:
            return value, place


def _read_string(block: bytes, place: int) -> tuple[bytes, int]:
    if block[place] & 0x80:
        raise Unsupported("the Huffman code")
    length, place = _integer(block, place, 7)
    if place + length > len(block):
        raise Unsupported("a cut header")
    return block[place : place + length], place + length


def _percent_decoded(text: bytes) -> str:
    r"""Return a message as gRPC encodes it.

    >>> _percent_decoded(b"100%25 %E2%9C%93")
    '100% ✓'
    """
    head, *rest = text.split(b"%")
    return (head + b"".join(bytes((int(part[:2], 16),)) + part[2:] for part in rest)).decode(errors="replace")


def _metadata_value(name: str, value: bytes) -> str | bytes:
    """Return the value of a trailer: a text, or the bytes of a binary one, raw behind a zero byte or in base64."""
    if not name.endswith("-bin"):
        return value.decode(errors="replace")
    return value[1:] if value[:1] == b"\0" else a2b_base64(value + b"=" * (-len(value) % 4))
