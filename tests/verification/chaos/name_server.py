"""A name server for all machines, each of which queries its router's address: a thread of the driver."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping

from tests.verification.chaos.plan import Mode

DOMAIN = "mesh"
PORT, BYTES_MAX, TTL_SECONDS = 53, 512, 1
POLL_SECONDS, LATE_SECONDS = 0.2, 3.0
HEAD = 12
ANSWERED, REFUSED = 0x8180, 0x8182  # a recursive answer; the same with SERVFAIL [RFC 1035, 4.1.1]
A, IN = 1, 1
POINTER = 0xC000 | HEAD  # a pointer to the name in the question


class NameServer:
    """Answers queries for `NAME.mesh` with a machine's address. `modes` has the failure mode by affected machine."""

    def __init__(self) -> None:
        self.modes: dict[str, Mode] = {}
        self.asked: Counter[str] = Counter()  # by machine: queries while its names fail
        self._sockets: dict[socket.socket, str] = {}
        self._addresses: Mapping[str, str] = {}
        self._late: list[tuple[float, socket.socket, bytes, tuple[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="names")

    def start(self, routers: Mapping[str, str], addresses: Mapping[str, str]) -> None:
        """Serve at the routers' addresses, by machine; `addresses` are the known names."""
        self._addresses = {f"{name}.{DOMAIN}": address for name, address in addresses.items()}
        for machine, router in routers.items():
            asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            asked.bind((router, PORT))
            self._sockets[asked] = machine
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for asked in self._sockets:
            asked.close()

    def _run(self) -> None:
        while not self._over.is_set():
            for asked in select.select(list(self._sockets), [], [], POLL_SECONDS)[0]:
                with contextlib.suppress(OSError):
                    self._handle(asked, *asked.recvfrom(BYTES_MAX))
            now = time.monotonic()
            due, self._late = [one for one in self._late if one[0] <= now], [one for one in self._late if one[0] > now]
            for _, asked, answer, source in due:
                with contextlib.suppress(OSError):
                    asked.sendto(answer, source)

    def _handle(self, asked: socket.socket, question: bytes, source: tuple[str, int]) -> None:
        machine = self._sockets[asked]
        mode = self.modes.get(machine)
        self.asked[machine] += mode is not None
        answer = answer_query(question, self._addresses, refused=mode is Mode.REFUSED)
        if mode is Mode.LATE:
            self._late.append((time.monotonic() + LATE_SECONDS, asked, answer, source))
        elif mode is not Mode.SILENCED:
            asked.sendto(answer, source)


def answer_query(question: bytes, addresses: Mapping[str, str], *, refused: bool = False) -> bytes:
    """Answer one query [RFC 1035, 4]: an address, or that the name does not exist."""
    labels, place = [], HEAD
    while length := question[place]:
        labels.append(question[place + 1 : place + 1 + length].decode(errors="replace"))
        place += 1 + length
    kind, _ = struct.unpack_from("!HH", question, place + 1)
    asked, address = question[HEAD : place + 5], addresses.get(".".join(labels).lower(), "")
    flags = REFUSED if refused else ANSWERED if address else ANSWERED | 3
    found = b""
    if address and kind == A and not refused:
        found = struct.pack("!HHHIH", POINTER, A, IN, TTL_SECONDS, 4) + socket.inet_aton(address)
    return question[:2] + struct.pack("!HHHHH", flags, 1, bool(found), 0, 0) + asked + found
