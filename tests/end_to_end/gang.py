"""Run as a gang of two: rank 0 greets rank 1 over the address that both were given."""

from __future__ import annotations

import contextlib
import os
import socket
import time

RANK, SIZE = os.environ["RANK"], os.environ["WORLD_SIZE"]
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def greet() -> None:
    """Wait for the other one, and greet it."""
    with socket.create_server(ADDRESS) as server:
        other, _ = server.accept()
        with other:
            other.sendall(b"hello " + other.recv(100))


def be_greeted() -> None:
    """Call until somebody answers: the processes of a gang start in any order."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(ADDRESS) as line:
            line.sendall(f"{RANK} of {SIZE}".encode())
            print(line.recv(100).decode())
            return
        time.sleep(0.02)
    raise SystemExit("nobody answered")


if RANK == "0":
    greet()
else:
    be_greeted()
