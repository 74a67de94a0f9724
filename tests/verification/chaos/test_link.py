"""Garbling damages exactly what an application must detect."""

from __future__ import annotations

import socket
import struct
from random import Random

import pytest
from tests.verification.chaos.link import BROKEN_HEAD, checksum, garbled, garbled_anywhere

HEADERS = 40


def packet(payload: bytes, protocol: int = socket.IPPROTO_TCP) -> bytes:
    """An IPv4 packet with a TCP segment and a correct checksum."""
    addresses = bytes([10, 0, 0, 1, 10, 0, 0, 2])
    ip = struct.pack("!BBHHHBBH", 0x45, 0, HEADERS + len(payload), 1, 0, 64, protocol, 0) + addresses
    tcp = bytearray(struct.pack("!HHIIBBHHH", 7070, 40000, 1, 1, 5 << 4, 24, 512, 0, 0) + payload)
    pseudo = addresses + struct.pack("!BBH", 0, protocol, len(tcp))
    struct.pack_into("!H", tcp, 16, checksum(pseudo + bytes(tcp)))
    return ip + bytes(tcp)


def frame(body: bytes, kind: int = 0, stream: int = 1) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, 0]) + stream.to_bytes(4) + body


@pytest.mark.parametrize("body", [b"", b"x", b"an odd length", bytes(1000)])
def test_a_garbled_frame_has_an_invalid_head_and_a_correct_checksum(body: bytes) -> None:
    whole = packet(frame(body))
    changed = garbled(whole)
    assert len(changed) == len(whole)
    assert changed[HEADERS:] == BROKEN_HEAD + body
    assert changed == packet(BROKEN_HEAD + body)  # the same headers except for the checksum


def test_packets_without_a_frame_head_are_unchanged() -> None:
    assert garbled(packet(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) == b""
    assert garbled(packet(frame(bytes(100))[:50])) == b""  # the end follows later
    assert garbled(packet(frame(b"x") + bytes([0, 0, 1, 77, 0, 0, 0, 0, 1]))) == b""  # a body that looks like a head
    assert garbled(packet(b"")) == b""
    assert garbled(packet(frame(b"x"), protocol=socket.IPPROTO_UDP)) == b""
    assert garbled(b"") == b""


@pytest.mark.parametrize("head", [b"POST /raft HTTP/1.1\r\n", b"GET /raft/stream HTTP/1.1\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_between_etcd_members_message_and_chunk_heads_are_garbled(head: bytes) -> None:
    chunk = b"1f\r\n" + bytes(0x1F) + b"\r\n"
    for whole in (head, chunk, chunk + b"1f\r\n" + bytes(4)):
        assert garbled(packet(whole)) == packet(b"\xff" + whole[1:])
    assert garbled(packet(chunk[:-3])) == b""  # the end follows later
    assert garbled(packet(bytes(3) + chunk)) == b""


def test_with_tls_any_payload_byte_changes_under_a_correct_checksum() -> None:
    rng, body = Random(1), bytes(range(200))
    found = set()
    for _ in range(2000):
        changed = garbled_anywhere(packet(body), rng)
        delivered = changed[HEADERS:]
        assert changed == packet(delivered)
        (place,) = (place for place, byte in enumerate(delivered) if byte != body[place])
        found.add(place)
    assert found == set(range(200))
    assert garbled_anywhere(packet(b""), rng) == b""
    assert garbled_anywhere(packet(body, protocol=socket.IPPROTO_UDP), rng) == b""
