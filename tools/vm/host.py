"""Requirements of this computer and facts about its distribution: tools, packages, mirror."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Each tool and the package that contains it.
EMULATOR = {"qemu-system-x86_64": "qemu-system-x86", "mksquashfs": "squashfs-tools", "mkfs.ext4": "e2fsprogs"}
BUILDERS = {"debootstrap": "debootstrap", "cpio": "cpio", "apt-get": "apt", "dpkg": "dpkg"}
BUSYBOX = {"busybox": "busybox-static"}
KERNELS = {"debian": "linux-image-cloud-amd64", "ubuntu": "linux-image-virtual"}


class Unable(Exception):
    """The machine cannot be built or started here; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of this computer, which the machine runs as well.

    `mirror` and `components` are apt's package sources; empty if apt has no lists.
    """

    name: str
    codename: str
    mirror: str = ""
    components: tuple[str, ...] = ()

    @property
    def kernel_package(self) -> str:
        """The package that depends on the newest small kernel."""
        return KERNELS[self.name]


def run(*words: str | Path, environment: dict[str, str] | None = None, directory: Path | None = None) -> str:
    """Run a command and return its output. Raises `Unable` with the end of its output if it fails."""
    done = subprocess.run(
        words,
        cwd=directory,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise Unable(f"{words[0]} failed with status {done.returncode}:\n{done.stdout[-3000:].strip()}")
    return done.stdout


def have(tools: dict[str, str], purpose: str) -> None:
    """Install missing tools as root; otherwise name them. Raises `Unable`."""
    missing = sorted({package for tool, package in tools.items() if not find(tool)})
    if not missing:
        return
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        raise Unable(f"to {purpose}, install first: sudo apt-get install {' '.join(missing)}")
    print(f"   installing {' '.join(missing)} (apt)", flush=True)
    command = ("apt-get", "install", "-y", "--no-install-recommends", *missing)
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(*command, environment=quiet)
    except Unable:  # the lists may be missing or old
        run("apt-get", "update")
        run(*command, environment=quiet)


def find(tool: str) -> Path | None:
    """Return the path of a tool, also among those for administrators."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(tool, path=path)
    return Path(found) if found else None


def distribution(release: Path = Path("/etc/os-release")) -> Distribution:
    """Return this computer's distribution. Raises `Unable` if it is neither Debian nor Ubuntu."""
    lines = release.read_text().splitlines() if release.exists() else []
    fields = {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines)}
    name, codename = fields.get("ID", ""), fields.get("VERSION_CODENAME", "")
    if name not in KERNELS or not codename:
        raise Unable("the machine is built from this computer's packages; hint: run this on Debian or Ubuntu")
    return Distribution(name, codename)


def with_mirror(known: Distribution) -> Distribution:
    """Return the distribution with apt's package sources. Raises `Unable` if apt has none."""
    lines = _package_lists()
    if not any(codename == known.codename for codename, _, _ in lines):
        run("apt-get", "update")
        lines = _package_lists()
    own = [(site, component) for codename, site, component in lines if codename == known.codename]
    if not own:
        raise Unable(f"apt has no source for {known.codename}: see /etc/apt/sources.list.d, then apt-get update")
    mirror = own[0][0]
    components = dict.fromkeys(component for site, component in own if site == mirror)
    return Distribution(known.name, known.codename, mirror, tuple(components))


def _package_lists() -> list[tuple[str, str, str]]:
    """Return the codename, site and component of each of apt's package lists."""
    targets = run("apt-get", "indextargets", "--format", "$(CODENAME) $(SITE) $(COMPONENT)", "Created-By: Packages")
    fields: list[Sequence[str]] = [line.split() for line in targets.splitlines()]
    return [(line[0], line[1], line[2]) for line in fields if len(line) == 3]


def proxies() -> dict[str, str]:
    """Return apt's proxies as environment variables."""
    variables = {}
    for scheme in ("http", "https"):
        value = run("apt-config", "shell", "proxy", f"Acquire::{scheme}::Proxy").strip()
        if value:
            variables[f"{scheme}_proxy"] = value.partition("=")[2].strip("'")
    return variables
