"""The name server answers according to RFC 1035, or fails in the selected mode."""

from __future__ import annotations

import struct

from tests.verification.chaos.name_server import answer_query

ADDRESSES = {"queue-1.mesh": "10.91.7.2"}
HEAD = struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0)


def question(name: str, kind: int = 1) -> bytes:
    """A query for a name, as a resolver sends it."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return HEAD + labels + b"\0" + struct.pack("!HH", kind, 1)


def test_a_known_name_has_an_address_in_any_case() -> None:
    answer = answer_query(question("Queue-1.mesh"), ADDRESSES)
    assert struct.unpack_from("!HHHHHH", answer) == (7, 0x8180, 1, 1, 0, 0)
    assert answer.endswith(bytes([10, 91, 7, 2]))


def test_an_unknown_name_is_nxdomain_and_a_missing_record_is_not() -> None:
    assert struct.unpack_from("!HHHH", answer_query(question("other.mesh"), ADDRESSES)) == (7, 0x8183, 1, 0)
    assert struct.unpack_from("!HHHH", answer_query(question("queue-1.mesh", kind=28), ADDRESSES)) == (7, 0x8180, 1, 0)


def test_a_refusing_server_refuses_every_name() -> None:
    assert struct.unpack_from("!HHHH", answer_query(question("queue-1.mesh"), ADDRESSES, refused=True)) == (
        7,
        0x8182,
        1,
        0,
    )
