"""Builds the images of deploy/containers; their base image consists of packages of this distribution."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from tools.vm.host import Unable, distribution, proxies, run, with_mirror

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "deploy" / "containers"
BASE = "docker.io/library/debian:bookworm-slim"
IMAGES = {  # by tag: the file, and its target
    "cotenant-server:local": ("Containerfile", "server"),
    "cotenant-agent:local": ("Containerfile", "agent"),
    "cotenant-client:local": ("Containerfile", "client"),
    "cotenant-etcd:local": ("Containerfile.etcd", ""),
}
HOST_FILES = (  # for access to the package sources that this machine uses
    "/etc/apt",
    "/etc/pip.conf",
    "/etc/ssl/certs",
    "/usr/local/share/ca-certificates",
)


def configure(place: Path) -> dict[str, str]:
    """Write a Podman configuration that stores everything under `place`; return its environment variables."""
    hybrid = not Path("/sys/fs/cgroup/cgroup.controllers").exists()
    pids = int(Path("/proc/sys/kernel/pid_max").read_text())
    processes, files = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE))
    (place / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{place}/storage"\nrunroot = "{place}/run"\n'
    )
    (place / "containers.conf").write_text(
        "[containers]\n"
        f'default_ulimits = ["nofile={files}:{files}", "nproc={min(processes, pids)}:{min(processes, pids)}"]\n'
        "[engine]\n"
        f'runtime = "{"runc" if hybrid else "crun"}"\n'  # crun does not support hybrid control groups
        'cgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{place}/networks"\n'
    )
    return {
        **os.environ,
        "CONTAINERS_STORAGE_CONF": str(place / "storage.conf"),
        "CONTAINERS_CONF": str(place / "containers.conf"),
    }


def base(cache: Path) -> Path:
    """Return a minimal Debian root directory, cached after the first call.

    Raises:
        Unable: this machine does not run that Debian release.
    """
    suite = BASE.rpartition(":")[2].removesuffix("-slim")
    known = distribution()
    if known.codename != suite:
        raise Unable(f"the base image needs packages of Debian {suite}; this machine runs {known.codename}")
    kept = cache / suite
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=cache))
        mirror = with_mirror(known).mirror
        run("debootstrap", "--variant=minbase", suite, partial, mirror, environment=proxies())
        for path in HOST_FILES:
            if Path(path).exists():
                target = partial / path[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-rL", "--remove-destination", "-T", path, str(target)], check=False)
        partial.chmod(0o755)
        partial.rename(kept)
    return kept


def build(cache: Path, environment: dict[str, str]) -> None:
    """Import the base image, build all images, check that each answers `--version` as its own user, and print sizes."""
    with subprocess.Popen(["tar", "-c", "-C", str(base(cache)), "."], stdout=subprocess.PIPE) as archive:
        _podman("import", "-", BASE, environment=environment, stdin=archive.stdout)
    for tag, (name, target) in IMAGES.items():
        print(f"── {tag}", flush=True)
        words = ["build", "--network", "host", "--tag", tag, "--file", str(CONTAINERS / name)]
        if target:
            words += ["--target", target]
        _podman(*words, str(ROOT), environment=environment)
        version = _podman("run", "--rm", "--network", "none", tag, "--version", environment=environment)
        size = int(_podman("image", "inspect", tag, "--format", "{{.Size}}", environment=environment))
        print(f"   {version.splitlines()[0]}, {size / 1e6:.0f} MB", flush=True)


def _podman(*words: str, environment: dict[str, str], stdin: IO[bytes] | None = None) -> str:
    done = subprocess.run(
        ["podman", *words],
        env=environment,
        stdin=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise Unable(f"podman {' '.join(words)} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout
