"""Delays and garbles packets between parts, in our own process: the kernel queues them here and waits for verdicts.

Theory of operation. A rule of the router sends packets from one part to another to a netfilter queue (`NFQUEUE`) whose
number identifies the link. Each packet waits here for its own delay, so packets overtake each other. A garbled packet
gets another head for its first HTTP/2 frame, with a length that no receiver accepts, and a correct checksum, so that
TCP delivers it: only the application can reject it. Members of etcd speak HTTP/1.1 with each other; there the head of a
message or a chunk is damaged. Other bytes are left alone, because no part could detect the damage; with TLS, which
detects it, any byte is changed. Packet loss and partitions are rules of the router and do not pass through here.

The messages are those of the kernel's include/uapi/linux/netfilter/nfnetlink_queue.h.
"""

from __future__ import annotations

import contextlib
import heapq
import re
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

NETLINK_NETFILTER, SUBSYSTEM = 12, 3 << 8
PACKET, VERDICT, CONFIG = SUBSYSTEM, SUBSYSTEM | 1, SUBSYSTEM | 2
PACKET_HEADER, VERDICT_HEADER, PAYLOAD = 1, 2, 10
COMMAND, PARAMETERS, LENGTH_MAX = 1, 2, 3
BIND, COPY_PACKET, ACCEPT = 1, 2, 1
REQUEST = 1
BYTES_MAX, QUEUE_MAX = 65_535, 4096
FRAME_HEAD = 9
FRAME_TYPES_MAX, FRAME_FLAGS, STREAM_MAX = 9, 0x2D, 1 << 24
BROKEN_HEAD = b"\xff\xff\xff\x00\xff\x00\x00\x00\x00"  # 16 MiB of DATA on stream 0
MESSAGE_HEAD = re.compile(rb"(POST|GET|HTTP/1\.1) ")
CHUNK_HEAD, CHUNK_END = re.compile(rb"([0-9a-f]{1,8})\r\n"), b"\r\n"
BROKEN_BYTE = b"\xff"
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Impairment:
    """The treatment of packets from one part to another."""

    delay_seconds_max: float = 0.0
    delay_seconds_min: float = 0.0
    garbled: float = 0.0  # share of the packets with a frame's head
    anywhere: bool = False  # or of all packets with payload, changing any byte: TLS detects it


class Emulator:
    """Handles all impaired links of one network namespace: that of the creating thread."""

    def __init__(self, rng: Random) -> None:
        self.wires: dict[int, Impairment] = {}
        self.garbled: Counter[int] = Counter()  # by queue: packets
        self.delayed: Counter[int] = Counter()
        self._rng = rng
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._socket.bind((0, 0))
        self._waiting: list[tuple[float, int, bytes]] = []  # time, sequence number and verdict
        self._count = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="emulator")
        self._thread.start()

    def put(self, queue: int, impairment: Impairment) -> None:
        """Set the treatment of a queue's packets."""
        if queue not in self.wires:
            for body in (
                _attribute(COMMAND, struct.pack("!BxH", BIND, 0)),
                _attribute(PARAMETERS, struct.pack("!IB", BYTES_MAX, COPY_PACKET)),
                _attribute(LENGTH_MAX, struct.pack("!I", QUEUE_MAX)),
            ):
                self._socket.send(_message(CONFIG, queue, body))
        self.wires[queue] = impairment

    def close(self) -> None:
        """Let all packets pass, and stop."""
        self._over.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._over.is_set():
            wait_seconds = min(POLL_SECONDS, self._waiting[0][0] - time.monotonic()) if self._waiting else POLL_SECONDS
            if select.select([self._socket], [], [], max(0.0, wait_seconds))[0]:
                with contextlib.suppress(OSError):  # the buffer overflowed: packets are lost, as on a wire
                    self._take_all(self._socket.recv(1 << 18))
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                with contextlib.suppress(OSError):
                    self._socket.send(heapq.heappop(self._waiting)[2])

    def _garbled(self, packet: bytes, impairment: Impairment) -> bytes:
        return garbled_anywhere(packet, self._rng) if impairment.anywhere else garbled(packet)

    def _take_all(self, data: bytes) -> None:
        for kind, body in _messages(data):
            if kind != PACKET:
                continue
            queue = struct.unpack_from("!H", body, 2)[0]
            attributes = dict(_attributes(body[4:]))
            packet_id = struct.unpack_from("!I", attributes[PACKET_HEADER])[0]
            self._judge(queue, packet_id, attributes.get(PAYLOAD, b""))

    def _judge(self, queue: int, packet_id: int, packet: bytes) -> None:
        impairment = self.wires.get(queue, Impairment())
        verdict = _attribute(VERDICT_HEADER, struct.pack("!II", ACCEPT, packet_id))
        if (
            impairment.garbled
            and self._rng.random() < impairment.garbled
            and (other := self._garbled(packet, impairment))
        ):
            verdict += _attribute(PAYLOAD, other)
            self.garbled[queue] += 1
        self.delayed[queue] += impairment.delay_seconds_max > 0
        until = time.monotonic() + self._rng.uniform(impairment.delay_seconds_min, impairment.delay_seconds_max)
        self._count += 1
        heapq.heappush(self._waiting, (until, self._count, _message(VERDICT, queue, verdict)))


def garbled(packet: bytes) -> bytes:
    """Return an IPv4 packet whose TCP payload starts with a head, with a damaged head; "" for any other.

    The head may belong to an HTTP/2 frame, an HTTP/1.1 message or a chunk.
    """
    begin = _payload(packet)
    if _starts_message(packet[begin:]):
        return _replaced(packet, begin, BROKEN_BYTE)
    if len(packet) - begin < FRAME_HEAD or not _starts_frame(packet[begin:]):
        return b""
    return _replaced(packet, begin, BROKEN_HEAD)


def garbled_anywhere(packet: bytes, rng: Random) -> bytes:
    """Return an IPv4 packet with a changed byte in its TCP payload; empty if it has none."""
    begin = _payload(packet)
    if begin >= len(packet):
        return b""
    place = rng.randrange(begin, len(packet))
    return _replaced(packet, place, bytes([packet[place] ^ rng.randint(1, 255)]))


def _payload(packet: bytes) -> int:
    """Return the offset of the TCP payload; the packet's length if there is none."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return len(packet)
    tcp = _tcp(packet)
    return tcp + (packet[tcp + 12] >> 4) * 4


def _tcp(packet: bytes) -> int:
    return (packet[0] & 15) * 4


def _replaced(packet: bytes, place: int, other: bytes) -> bytes:
    """Replace bytes of a packet, and update its checksum."""
    changed, tcp = bytearray(packet), _tcp(packet)
    changed[place : place + len(other)] = other
    changed[tcp + 16 : tcp + 18] = b"\0\0"
    pseudo = packet[12:20] + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(packet) - tcp)
    struct.pack_into("!H", changed, tcp + 16, checksum(pseudo + bytes(changed[tcp:])))
    return bytes(changed)


def _starts_message(payload: bytes) -> bool:
    """Return whether this is a complete message head, or chunk head, of HTTP/1.1 [RFC 9112, 7.1]."""
    if MESSAGE_HEAD.match(payload):
        return True
    if not (chunk := CHUNK_HEAD.match(payload)):
        return False
    end = chunk.end() + int(chunk[1], 16)
    return payload[end : end + len(CHUNK_END)] == CHUNK_END


def _starts_frame(payload: bytes) -> bool:
    """Return whether this looks like frames, the first of them complete [RFC 9113, 4.1]; bodies hardly ever do."""
    place = 0
    while len(payload) - place >= FRAME_HEAD:
        kind, flags, stream = struct.unpack_from("!BBI", payload, place + 3)
        if kind > FRAME_TYPES_MAX or flags & ~FRAME_FLAGS or stream > STREAM_MAX:
            return False
        length = int.from_bytes(payload[place : place + 3])
        if place == 0 and length + FRAME_HEAD > len(payload):
            return False
        place += FRAME_HEAD + length
    return place > 0


def checksum(data: bytes) -> int:
    """Return the Internet checksum [RFC 1071].

    >>> hex(checksum(bytes.fromhex("0001f203f4f5f6f7")))
    '0x220d'
    """
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _message(kind: int, queue: int, body: bytes) -> bytes:
    whole = struct.pack("!BBH", socket.AF_UNSPEC, 0, queue) + body
    return struct.pack("=IHHII", 16 + len(whole), kind, REQUEST, 0, 0) + whole


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        yield kind, data[16:length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]
