"""A workspace for buf, with the protos that ours import: buf would download them, but they are installed anyway.

googleapis-common-protos has google/api/*.proto, which the annotations for HTTP and for fields come from.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT = Path(__file__).resolve().parent.parent
BUF = Path(sys.executable).parent / "buf"
IMPORTED = ("annotations", "field_behavior", "http")  # of google/api
MODULE, CONFIG = "googleapis", "buf.yaml"  # in a workspace
FILE = "use: [FILE]"  # which breaking changes buf.yaml forbids
PUBLIC = ("protos/cotenant/v1",)
OTHERS = ("protos/cotenant/agent", "protos/cotenant/internal", "protos/cotenant/storage")


@contextmanager
def workspace(root: Path = ROOT) -> Iterator[Path]:
    """Yield a folder with the protos and buf.yaml of a source tree, and a second module with what they import."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        shutil.copytree(root / "protos", folder / "protos")
        copy_imports(folder / MODULE)
        config = (root / CONFIG).read_text()
        ours = "  - path: protos\n"
        assert ours in config, f"{CONFIG} has no module 'protos'"
        (folder / CONFIG).write_text(config.replace(ours, f"{ours}  - path: {MODULE}\n"))
        yield folder


def copy_imports(folder: Path) -> None:
    """Copy the imported files of google/api from the installed package."""
    found = find_spec("google.api.annotations_pb2")
    assert found
    assert found.origin
    (folder / "google" / "api").mkdir(parents=True)
    for name in IMPORTED:
        shutil.copy(Path(found.origin).with_name(f"{name}.proto"), folder / "google" / "api")


def buf(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run buf in a folder."""
    return subprocess.run(
        [str(BUF), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Lint our protos, not what they import."""
    return buf(folder, "lint", "protos")


def breaking(folder: Path, before: Path) -> subprocess.CompletedProcess[str]:
    """Compare our protos with an earlier state of them; both folders are workspaces.

    The public package may not change for a caller, not even in names. The others may not change on the wire: processes
    of two successive releases work together, and records are read by the next release.
    """
    image = before / "before.binpb"
    done = buf(before, "build", "protos", "--output", str(image))
    if done.returncode:
        return done
    config = (folder / CONFIG).read_text()
    assert FILE in config, f"{CONFIG} does not have {FILE!r}"
    found = ""
    for use, ignore in (("FILE", OTHERS), ("WIRE", PUBLIC)):
        rules = config.replace(FILE, f"use: [{use}]\n  ignore: [{', '.join(ignore)}]")
        done = buf(folder, "breaking", "protos", "--exclude-imports", "--against", str(image), "--config", rules)
        found += done.stdout
    done.returncode, done.stdout = int(bool(found)), found
    return done


def descriptors(root: Path = ROOT) -> FileDescriptorSet:
    """Return the descriptors of our protos and of what they import, with comments.

    Raises:
        RuntimeError: buf rejects a file.
    """
    with workspace(root) as folder:
        image = folder / "image.binpb"
        done = buf(folder, "build", "protos", "--as-file-descriptor-set", "--output", str(image))
        if done.returncode:
            raise RuntimeError(f"buf build failed:\n{done.stdout}")
        return FileDescriptorSet.FromString(image.read_bytes())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.protos DIRECTORY")
    with workspace() as made:
        shutil.copytree(made, sys.argv[1], dirs_exist_ok=True)
    print(f"   wrote {sys.argv[1]}: protos, {MODULE} and {CONFIG}")
