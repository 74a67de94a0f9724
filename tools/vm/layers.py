"""Makes what the machine is started with, and keeps it: a kernel, a first file system, and layers of its root.

Each layer is a squashfs image; the machine lays them over each other and a tmpfs over all. The lowest holds the
distribution and the Python packages that the project needs, and is made anew only when those change; then comes the
project's wheel. They are kept in a cache under a digest of what they are made of. The uppermost layer, with the tests,
is made each time: see `session`.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.vm.host import BUILDERS, BUSYBOX, Distribution, Unable, find, have, proxies, run, with_mirror

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SYSTEM_PACKAGES = ("python3", "python3-venv", "libgomp1", "stress-ng", "procps", "systemd-sysv", "dbus", "etcd-server")
MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "squashfs", "overlay", "ext4")
TEST_PACKAGES = re.compile(r"(pytest|hypothesis)\b")
WHEEL_SOURCES = ("src", "services", "policies", "node_agent", "protos", "pyproject.toml", "hatch_build.py")
KEPT_OF_EACH_KIND = 3
SITE = "usr/local/lib/{python}/dist-packages"
WHEELS = "opt/wheels"  # what `install.sh` is given inside, where there is no index of packages


class Cache:
    """A directory of things that were made once: each `KIND-DIGEST`, or absent."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path, self._fresh = path, fresh
        path.mkdir(parents=True, exist_ok=True)

    def get(self, kind: str, parts: Iterable[str | Path], make: Callable[[Path], None]) -> Path:
        """Return what was made of `parts`, or make it now; `make` gets a directory to fill."""
        place = self.path / f"{kind}-{digest(parts)}"
        with self._alone():
            if self._fresh or not place.exists():
                print(f"   making the {kind}", flush=True)
                with tempfile.TemporaryDirectory(dir=self.path, prefix="new-") as new:
                    filled = Path(new) / "filled"
                    filled.mkdir()
                    make(filled)
                    shutil.rmtree(place, ignore_errors=True)
                    filled.rename(place)
            os.utime(place)
            older = sorted(self.path.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in older[KEPT_OF_EACH_KIND:]:
                shutil.rmtree(path)
        return place

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let two runs at once not make the same thing twice."""
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def digest(parts: Iterable[str | Path]) -> str:
    """A short name for texts and for the contents of files and folders."""
    sum_ = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            sum_.update(f"{part}\0".encode())
            continue
        files = [part] if part.is_file() else sorted(path for path in part.rglob("*") if path.is_file())
        for path in files:
            if "__pycache__" not in path.parts:
                sum_.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return sum_.hexdigest()[:16]


def kernel(cache: Cache, system: Distribution) -> Path:
    """A folder with `vmlinuz` and `initramfs`: the distribution's own kernel, with what it needs to find the layers."""

    def make(place: Path) -> None:
        can_build("get a kernel", BUILDERS | BUSYBOX)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            unpacked = _unpack_kernel(Path(scratch), system.kernel_package)
            (image,) = (unpacked / "boot").glob("vmlinuz-*")
            shutil.copy(image, place / "vmlinuz")
            _pack_initramfs(place / "initramfs", unpacked, Path(scratch) / "first")

    return cache.get("kernel", [system.codename, HERE / "init", HERE / "layers.py"], make)


def _unpack_kernel(scratch: Path, package: str) -> Path:
    """Download what the package depends on, and unpack it without installing anything."""
    try:
        names = _dependencies(package)
    except Unable:
        run("apt-get", "update")
        names = _dependencies(package)
    scratch.chmod(0o755)
    for name in names:
        run("apt-get", "-o", "APT::Sandbox::User=root", "download", name, directory=scratch)
    for archive in scratch.glob("*.deb"):
        run("dpkg", "-x", archive, scratch / "kernel")
    return scratch / "kernel"


def _dependencies(package: str) -> list[str]:
    """The image that a package stands for, and its modules where they are packed apart."""
    told = run("apt-cache", "depends", "--important", package)
    names = [name for name in re.findall(r"Depends: (\S+)", told) if re.match(r"linux-(image|modules)-\d", name)]
    if not names:
        raise Unable(f"apt knows no kernel behind {package}")
    told = run("apt-cache", "depends", "--important", *names)
    return list(dict.fromkeys([*names, *re.findall(r"Depends: (linux-modules-\d\S+)", told)]))


def _pack_initramfs(archive: Path, unpacked: Path, tree: Path) -> None:
    for folder in ("bin", "proc", "sys", "dev", "modules"):
        (tree / folder).mkdir(parents=True)
    busybox = find("busybox")
    assert busybox
    if b"ld-linux" in busybox.read_bytes()[:4096]:
        raise Unable("the machine begins with a static busybox: sudo apt-get install busybox-static")
    shutil.copy(busybox, tree / "bin" / "busybox")
    shutil.copy(HERE / "init", tree / "init")
    (tree / "init").chmod(0o755)
    names = []
    for path in load_order(unpacked / "lib" / "modules", MODULES):
        names.append(f"{module_name(path)}.ko")
        (tree / "modules" / names[-1]).write_bytes(read_module(path))
    (tree / "modules" / "order").write_text("".join(f"{name}\n" for name in names))
    listing = "".join(f"{path.relative_to(tree)}\n" for path in [tree, *sorted(tree.rglob("*"))])
    packed = subprocess.run(
        ["cpio", "--quiet", "-o", "-H", "newc"], cwd=tree, input=listing.encode(), capture_output=True, check=True
    ).stdout
    archive.write_bytes(gzip.compress(packed, 6))


def module_name(path: Path) -> str:
    """What a module calls itself: dashes in its file's name are underscores."""
    return path.name.partition(".")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """A module, unpacked where the distribution compresses it."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        have({"zstd": "zstd"}, "unpack kernel modules")
        return subprocess.run(["zstd", "-dcq", path], capture_output=True, check=True).stdout
    return path.read_bytes()


def load_order(modules: Path, wanted: Iterable[str]) -> list[Path]:
    """The files of modules and of all that they need, each after what it needs; what is built in has no file."""
    files = {module_name(path): path for path in modules.rglob("*.ko*")}
    order: dict[str, Path] = {}

    def add(name: str) -> None:
        if name not in files or name in order:
            return
        told = re.search(rb"\0depends=([^\0]*)\0", read_module(files[name]))
        for needed in told[1].decode().split(",") if told else []:
            add(needed)
        order[name] = files[name]

    for name in wanted:
        add(name)
    return list(order.values())


def base(cache: Cache, system: Distribution) -> Path:
    """The layer with the distribution, and with the Python packages that the project and its tests need."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tests = [line for line in config["dependency-groups"]["dev"] if TEST_PACKAGES.match(line)]
    requirements = [*config["project"]["dependencies"], *tests]

    def make(place: Path) -> None:
        can_build("make the machine's file system", BUILDERS)
        tree = place / "tree"
        known = with_mirror(system)
        run(
            *("debootstrap", "--variant=minbase", f"--include={','.join(SYSTEM_PACKAGES)}"),
            *(f"--components={','.join(known.components)}", known.codename, tree, known.mirror),
            environment=proxies(),
        )
        python = (tree / "usr" / "bin" / "python3").readlink().name
        _pip_install(tree, python, requirements)
        for needless in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "boot"):
            shutil.rmtree(tree / needless, ignore_errors=True)
        pack(tree, place / "image")
        shutil.rmtree(tree)
        (place / "python").write_text(python)

    return cache.get("base", [system.codename, *SYSTEM_PACKAGES, *requirements, HERE / "layers.py"], make)


def _pip_install(tree: Path, python: str, words: Iterable[str]) -> None:
    """Install into a tree with this Python's pip, which knows where this computer takes packages from."""
    foreign = ["--no-compile", *_foreign(python)] if _foreign(python) else []
    target = tree / SITE.format(python=python)
    options = ["--quiet", "--no-warn-script-location", "--target", str(target), *foreign]
    run(sys.executable, "-m", "pip", "install", *options, *words)


def _foreign(python: str) -> list[str]:
    """What pip has to be told where the machine's Python is not of this one's version."""
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return ["--only-binary=:all:", "--python-version", python.removeprefix("python")] if python != ours else []


def wheels(cache: Cache, python: str) -> Path:
    """The layer with a wheel of each package that the project needs: an index that is there without a network."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]

    def make(place: Path) -> None:
        tree = place / "tree"
        words = ["--quiet", "--dest", str(tree / WHEELS), *_foreign(python)]
        run(sys.executable, "-m", "pip", "download", *words, *requirements)
        pack(tree, place / "image", "-all-root")
        shutil.rmtree(tree)

    return cache.get("wheels", [python, *requirements, HERE / "layers.py"], make)


def project(cache: Cache, python: str) -> Path:
    """The layer with the project's wheel, installed, and as it is."""

    def make(place: Path) -> None:
        tree = place / "tree"
        run(sys.executable, "-m", "build", "--quiet", "--wheel", "--outdir", tree / WHEELS, ROOT)
        _pip_install(tree, python, ["--no-deps", *(str(wheel) for wheel in (tree / WHEELS).glob("*.whl"))])
        pack(tree, place / "image", "-all-root")
        shutil.rmtree(tree)

    return cache.get("project", [python, *(ROOT / name for name in WHEEL_SOURCES), HERE / "layers.py"], make)


def pack(tree: Path, image: Path, *owners: str) -> None:
    """Pack a tree into an image that an emulated processor unpacks quickly."""
    tree.chmod(0o755)
    run("mksquashfs", tree, image, "-comp", "lz4", "-quiet", "-no-progress", "-noappend", *owners)


def can_build(purpose: str, tools: dict[str, str]) -> None:
    """Raise `Unable` where we are not root, or tools are missing and cannot be installed."""
    if os.getuid() != 0:
        raise Unable(f"to {purpose} takes root, once; afterwards any user may run the tests: sudo make test-vm")
    have(tools, purpose)
