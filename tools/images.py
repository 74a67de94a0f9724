"""Tries the images of deploy/containers without an engine: `make test-images`, as root on Debian.

Each Containerfile's instructions are carried out in directories: `FROM debian:…` is what debootstrap makes, `RUN` is
done by chroot, and at the end the entry point answers `--version` as the image's user. What an engine would add
(layers, namespaces) is not tried.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTAINERS = ROOT / "deploy" / "containers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "cotenant-images"
OF_THIS_MACHINE = (
    "/etc/resolv.conf",
    "/etc/apt",
    "/etc/pip.conf",
    "/etc/ssl/certs",
    "/usr/local/share/ca-certificates",
)
TRIED = {"Containerfile": ["--version"], "Containerfile.etcd": ["--version"]}


@dataclass
class Stage:
    """One stage of a build: its files, and what was said of how to run it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    directory: str = "/"
    user: str = "root"
    entry: list[str] = field(default_factory=list)

    def run(self, command: str, user: str = "root") -> str:
        """Run a command of a shell inside; what it prints."""
        become = ["--userspec", user] if user != "root" else []
        passed = {
            name: value for name, value in os.environ.items() if "proxy" in name.lower() or name.startswith("PIP_")
        }
        done = subprocess.run(
            ["chroot", *become, str(self.root), "/bin/sh", "-ec", f"cd {self.directory}; {command}"],
            env={**passed, **self.environment, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{command}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """Read a Containerfile: each instruction and its words."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def base(image: str) -> Path:
    """A fresh Debian, from the cache after the first time."""
    suite = image.partition(":")[2].removesuffix("-slim")
    kept = CACHE / suite
    if not kept.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=CACHE))
        subprocess.run(["debootstrap", "--variant=minbase", suite, str(partial)], check=True, stdout=subprocess.DEVNULL)
        for path in OF_THIS_MACHINE:
            if Path(path).exists():
                target = partial / path[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-rL", "--remove-destination", "-T", path, str(target)], check=False)
        partial.chmod(0o755)
        partial.rename(kept)
    return kept


def build(path: Path, work: Path) -> Stage:
    """Carry out all instructions; returns the last stage."""
    stages: dict[str, Stage] = {}
    stage = Stage(work)
    for word, rest in instructions(path):
        print(f"   {word} {rest[:90]}", file=sys.stderr)
        match word:
            case "FROM":
                image, _, name = rest.partition(" AS ")
                root = work / (name or f"stage{len(stages)}")
                subprocess.run(["cp", "-a", str(base(image)), str(root)], check=True)
                stage = stages[name or root.name] = Stage(root)
            case "RUN":
                stage.run(rest)
            case "WORKDIR":
                stage.directory = rest
                (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
            case "ENV":
                pairs = (pair.partition("=") for pair in shlex.split(rest))
                stage.environment.update({name: value for name, _, value in pairs})
            case "USER":
                stage.user = rest
            case "ENTRYPOINT":
                stage.entry = [str(one) for one in json.loads(rest)]
            case "COPY":
                copy(rest, stage, stages)
            case "EXPOSE" | "CMD":
                pass
            case _:
                raise SystemExit(f"{path.name}: {word} is not known here")
    return stage


def copy(rest: str, stage: Stage, stages: dict[str, Stage]) -> None:
    """Copy from another stage, or what git knows of the checkout."""
    words = rest.split()
    target = stage.root / os.path.join(stage.directory, words[-1])[1:]
    if words[0].startswith("--from="):
        shutil.copytree(stages[words[0].removeprefix("--from=")].root / words[1][1:], target, symlinks=True)
        return
    target.mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(target)], input=tracked, check=True)


def main() -> None:
    """Build all, and try each."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise SystemExit("this takes root and debootstrap: apt-get install debootstrap")
    for name, words in TRIED.items():
        print(f"── {name}")
        with tempfile.TemporaryDirectory(prefix="images-") as work:
            Path(work).chmod(0o755)
            stage = build(CONTAINERS / name, Path(work))
            print(f"   {stage.run(shlex.join([*stage.entry, *words]), stage.user).splitlines()[0]}")


if __name__ == "__main__":
    main()
