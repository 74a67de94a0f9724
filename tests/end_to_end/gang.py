"""A gang of two: rank 0 greets rank 1 over the address that both are given."""

from __future__ import annotations

import contextlib
import os
import socket
import time

PATIENCE_SECONDS = 60.0


def greet(address: tuple[str, int]) -> None:
    """Wait for the other process and greet it."""
    with socket.create_server(address) as server:
        other, _ = server.accept()
        with other:
            other.sendall(b"hello " + other.recv(100))


def be_greeted(address: tuple[str, int], name: str) -> None:
    """Connect until the peer answers: the processes of a gang start in any order."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address) as line:
            line.sendall(name.encode())
            print(line.recv(100).decode())
            return
        time.sleep(0.02)
    raise SystemExit("nobody answered")


if __name__ == "__main__":
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == "0":
        greet(master)
    else:
        be_greeted(master, f"{rank} of {size}")
