"""Writes what a job sees of the GPUs: its variables, what torch finds, and which device files it can open.

`undone` is what torch finds without the variables that hide GPUs, which a job can remove.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
NVIDIA_MAJOR = 195
TORCH = """
import json, torch
count = torch.cuda.device_count()
found = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(count)]
if count:
    torch.ones(1, device="cuda")
print(json.dumps(found))
"""


def opened(path: Path) -> str:
    """Return `opened`, or the name of the error; EPERM means that the control group denies the device."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "opened"


def made_and_opened(path: Path, minor: int) -> str:
    """Return the same of a device file made here, where the driver has made none."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(NVIDIA_MAJOR, minor))
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    try:
        return opened(path)
    finally:
        path.unlink()


def torch_gpus(environment: dict[str, str]) -> list[str] | str:
    """Return the UUIDs of the GPUs on which torch can compute, or the last line of its error."""
    done = subprocess.run([sys.executable, "-c", TORCH], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found: list[str] = json.loads(done.stdout)
        return found
    return (done.stderr.strip().splitlines() or ["failed without output"])[-1]


def main() -> None:
    """Write the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--make-minors", type=int, default=0, help="try device files made for so many minor numbers")
    parser.add_argument("--torch", action="store_true", help="ask torch")
    arguments = parser.parse_args()
    files = sorted(path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit())
    found: dict[str, object] = {
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "files": {str(path): opened(path) for path in files},
        "made": {
            str(minor): made_and_opened(arguments.out.with_name(f"{arguments.out.stem}-{minor}"), minor)
            for minor in range(arguments.make_minors)
        },
    }
    if arguments.torch:
        found["torch"] = torch_gpus(dict(os.environ))
        found["undone"] = torch_gpus({name: text for name, text in os.environ.items() if name not in VARIABLES})
    new = arguments.out.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.rename(arguments.out)


if __name__ == "__main__":
    main()
