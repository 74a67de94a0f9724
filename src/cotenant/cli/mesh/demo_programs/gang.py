"""Two processes that train together: they exchange gradients over a socket in each step, so neither can run alone."""

from __future__ import annotations

import argparse
import os
import socket
import time

import numpy as np

from cotenant import progress

GRADIENTS = 1000
CONNECT_SECONDS = 10.0


def meet(rank: int, address: str, port: int) -> socket.socket:
    """Connect rank 1 to rank 0, which listens on the gang's port."""
    if rank == 0:
        with socket.create_server((address, port)) as server:
            server.settimeout(CONNECT_SECONDS)
            return server.accept()[0]
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)  # the other process does not listen yet


def exchange(peer: socket.socket, gradients: np.ndarray) -> np.ndarray:
    """Return the mean of our gradients and the peer's: an all-reduce of two."""
    peer.sendall(gradients.tobytes())
    data = b""
    while len(data) < gradients.nbytes:
        received = peer.recv(gradients.nbytes - len(data))
        if not received:
            raise ConnectionError("the other process of the gang has exited")
        data += received
    mean: np.ndarray = (gradients + np.frombuffer(data)) / 2
    return mean


def main() -> None:
    """Train for some steps, together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    rank = int(os.environ["RANK"])
    rng = np.random.default_rng(rank)
    weights = np.zeros(GRADIENTS)
    with meet(rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])) as peer:
        for step in range(1, steps + 1):
            time.sleep(0.08)  # the declared GPU's step
            weights -= 0.1 * exchange(peer, weights - 1 + 0.1 * rng.standard_normal(GRADIENTS))
            if rank == 0:
                progress.step(step, loss=float(np.square(weights - 1).mean()))
    print(f"rank {rank}: {steps} steps, mean weight {weights.mean():.3f}", flush=True)


if __name__ == "__main__":
    main()
