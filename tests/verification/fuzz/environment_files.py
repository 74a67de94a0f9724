"""Input of `submit` about the environment: dotenv files, and the settings of a `.venv`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.verification.fuzz.targets import Target, file_target

from cotenant.cli.jobs.env_file import BadFile, read_env_file
from cotenant.cli.jobs.python_environment import find_environment

VARIABLES = (b'# a\nexport A=b # c\nB=\'x\ny\'\nC="d\\n\\"" # e\n', b"\xef\xbb\xbfA=\r\n", b"A='\nA='\nA=\"\\\n=\nB")
CONFIG = (b"home = /usr/bin\nuv = 0.9.1\n", b"uv\n=")


def targets() -> Iterator[Target]:
    """Yield the targets."""
    words = (b"export ", b"='", b'="', b'\\"', b" #", b"\r\n")
    yield Target("environment file", file_target("a.env", _variables, VARIABLES, words), (BadFile,))
    yield Target("pyvenv.cfg", file_target(".venv/pyvenv.cfg", _venv, CONFIG, (b"uv =",)))


def _variables(path: Path) -> None:
    read_env_file(str(path))


def _venv(path: Path) -> None:
    find_environment({}, str(path.parent.parent))
