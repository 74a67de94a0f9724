"""Collects the wheels that a machine with a GPU lacks, for a machine that can download nothing.

    python -m benchmarks.gpu.wheels DIR
    python -m benchmarks.gpu.wheels DIR --without numpy,scipy,lightgbm

The folder gets the project's own wheel, and those of `locks/agent.txt` and `locks/server.txt` for Linux and one version
of Python, in the locked versions and with their hashes checked, except what the machine has in a version that is new
enough.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
LOCKS = ("agent", "server")
PYTHON, ARCHITECTURE = "3.12", "x86_64"
WITHOUT = ("numpy", "scipy")  # large, and wherever torch is
MEBIBYTES_MAX = 64.0
GLIBC_MINORS = range(5, 40)  # pip takes each tag literally
ENTRY = re.compile(
    r"^(?P<requirement>[A-Za-z0-9][^\\\n#]*?)\s*\\?\n(?P<hashes>(?:[ \t]+--hash=\S+\s*\\?\n)+)", re.MULTILINE
)


def locked(text: str, python: str = PYTHON) -> Iterator[tuple[str, str]]:
    """Yield the name of each requirement of a lock that holds for a version of Python, and its line for pip.

    >>> lock = "a==1 ; python_full_version < '3.12' \\\\\\n    --hash=sha256:0\\nA_b==2 \\\\\\n    --hash=sha256:1\\n"
    >>> list(locked(lock))
    [('a-b', 'A_b==2 --hash=sha256:1')]
    """
    target = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": ARCHITECTURE,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
    }
    for entry in ENTRY.finditer(text):
        requirement = Requirement(entry["requirement"])
        if requirement.marker is None or requirement.marker.evaluate(target):
            hashes = " ".join(re.findall(r"--hash=\S+", entry["hashes"]))
            yield canonicalize_name(requirement.name), f"{requirement.name}{requirement.specifier} {hashes}"


def requirements(texts: Iterable[str], without: Sequence[str], python: str = PYTHON) -> dict[str, str]:
    """Return the lines for pip by name, of several locks, without some names."""
    left_out = {canonicalize_name(name) for name in without}
    return {name: line for text in texts for name, line in locked(text, python) if name not in left_out}


def download(lines: Iterable[str], directory: Path, python: str) -> None:
    """Download wheels with pip."""
    tags = ["manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in GLIBC_MINORS)]
    platforms = [word for tag in tags for word in ("--platform", f"{tag}_{ARCHITECTURE}")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        _pip(
            "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--implementation", "cp",
            "--python-version", python, *platforms, "--dest", str(directory), "--requirement", file.name,
        )  # fmt: skip


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], cwd=ROOT, check=True)


def mebibytes(directory: Path) -> float:
    """Return the size of the wheels in a folder."""
    return sum(path.stat().st_size for path in directory.glob("*.whl")) / (1 << 20)


def main() -> int:
    """Collect the wheels and return the exit status: 1 if they are too large together."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder for the wheels; should be empty")
    parser.add_argument("--without", default=",".join(WITHOUT), metavar="NAME,…", help="what the machine has")
    parser.add_argument("--python", default=PYTHON, metavar="VERSION", help="of the machine")
    parser.add_argument("--mebibytes-max", type=float, default=MEBIBYTES_MAX, metavar="N", help="of all together")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"{directory} is not empty: an old version of a wheel would be installed as well")
    texts = [(ROOT / "locks" / f"{name}.txt").read_text() for name in LOCKS]
    wanted = requirements(texts, arguments.without.split(","), arguments.python)
    _pip("wheel", "--no-deps", "--wheel-dir", str(directory), str(ROOT))
    download(wanted.values(), directory, arguments.python)
    size = mebibytes(directory)
    print(f"{len(list(directory.glob('*.whl')))} wheels, {size:.1f} MiB, in {directory}")
    if size > arguments.mebibytes_max:
        print(f"error: more than {arguments.mebibytes_max:g} MiB; leave more out by --without", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
