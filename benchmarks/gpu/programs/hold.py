"""Holds memory of the GPU until it is ended, and writes its pid once it does.

With `--outlive`, a child in a session of its own holds the GPU, and the program ends successfully before it.
`--device none` holds nothing, for a rehearsal.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

MEBIBYTES = 512


def hold(device: str, told: Path) -> None:
    """Take the memory, write the pid, and wait for the end."""
    held = None
    if device == "cuda":
        import torch

        held = torch.ones(MEBIBYTES << 18, dtype=torch.float32, device=device)
        torch.cuda.synchronize()
    new = told.with_suffix(".new")
    new.write_text(str(os.getpid()))
    new.rename(told)
    signal.pause()
    del held


def main() -> None:
    """Hold the GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu", "none"), default="cuda")
    parser.add_argument("--pid-file", type=Path, required=True)
    parser.add_argument("--outlive", action="store_true")
    arguments = parser.parse_args()
    if arguments.outlive and os.fork():
        while not arguments.pid_file.exists():
            time.sleep(0.02)
        return
    if arguments.outlive:
        os.setsid()
    hold(arguments.device, arguments.pid_file)


if __name__ == "__main__":
    main()
