"""Builds and caches what machines are started from: a kernel, an initramfs, and layers of the root file system.

Each layer is a squashfs image; the machine stacks them with a tmpfs on top. The lowest has the distribution and the
Python packages that the project needs, and is rebuilt only when those change; the next has the project's wheel. They
are cached under a digest of their inputs. The uppermost layer, with the tests, is built for each run: see `session`.
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
WHEELS = "opt/wheels"  # offline package index for `install.sh`


class Cache:
    """A directory of builds, each named `KIND-DIGEST`."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path, self._fresh = path, fresh
        path.mkdir(parents=True, exist_ok=True)

    def get(self, kind: str, parts: Iterable[str | Path], make: Callable[[Path], None]) -> Path:
        """Return the build for `parts`, creating it if needed; `make` gets a directory to fill."""
        place = self.path / f"{kind}-{digest(parts)}"
        with self._alone():
            if self._fresh or not place.exists():
                print(f"   building the {kind}", flush=True)
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
        """Keep concurrent runs from building the same thing twice."""
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def digest(parts: Iterable[str | Path]) -> str:
    """Return a short digest of texts and of the contents of files and folders."""
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
    """Return a folder with `vmlinuz` and `initramfs`: the distribution's kernel with the modules to find the layers."""

    def make(place: Path) -> None:
        can_build("get a kernel", BUILDERS | BUSYBOX)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            unpacked = _unpack_kernel(Path(scratch), system.kernel_package)
            (image,) = (unpacked / "boot").glob("vmlinuz-*")
            shutil.copy(image, place / "vmlinuz")
            _pack_initramfs(place / "initramfs", unpacked, Path(scratch) / "first")

    return cache.get("kernel", [system.codename, HERE / "init", HERE / "layers.py"], make)


def _unpack_kernel(scratch: Path, package: str) -> Path:
    """Download the package's dependencies and unpack them without installing."""
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
    """Return the kernel image that a package depends on, and its modules if they are packaged separately."""
    depends = run("apt-cache", "depends", "--important", package)
    names = [name for name in re.findall(r"Depends: (\S+)", depends) if re.match(r"linux-(image|modules)-\d", name)]
    if not names:
        raise Unable(f"apt finds no kernel for {package}")
    depends = run("apt-cache", "depends", "--important", *names)
    return list(dict.fromkeys([*names, *re.findall(r"Depends: (linux-modules-\d\S+)", depends)]))


def _pack_initramfs(archive: Path, unpacked: Path, tree: Path) -> None:
    for folder in ("bin", "proc", "sys", "dev", "modules"):
        (tree / folder).mkdir(parents=True)
    busybox = find("busybox")
    assert busybox
    if b"ld-linux" in busybox.read_bytes()[:4096]:
        raise Unable("the machine starts with a static busybox; hint: sudo apt-get install busybox-static")
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
    """Return a module's name: dashes in its file name are underscores."""
    return path.name.partition(".")[0].replace("-", "_")


def read_module(path: Path) -> bytes:
    """Return a module's content, decompressed."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        have({"zstd": "zstd"}, "unpack kernel modules")
        return subprocess.run(["zstd", "-dcq", path], capture_output=True, check=True).stdout
    return path.read_bytes()


def load_order(modules: Path, wanted: Iterable[str]) -> list[Path]:
    """Return the files of modules and their dependencies, in load order; built-in modules have no file."""
    files = {module_name(path): path for path in modules.rglob("*.ko*")}
    order: dict[str, Path] = {}

    def add(name: str) -> None:
        if name not in files or name in order:
            return
        found = re.search(rb"\0depends=([^\0]*)\0", read_module(files[name]))
        for needed in found[1].decode().split(",") if found else []:
            add(needed)
        order[name] = files[name]

    for name in wanted:
        add(name)
    return list(order.values())


def base(cache: Cache, system: Distribution) -> Path:
    """Return the layer with the distribution and the Python packages that the project and its tests need."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tests = [line for line in config["dependency-groups"]["dev"] if TEST_PACKAGES.match(line)]
    requirements = [*_requirements(), *tests]

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


def _requirements() -> list[str]:
    """Return what a node with services and an agent needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["agent"], *extras["server"]]


def _pip_install(tree: Path, python: str, words: Iterable[str]) -> None:
    """Install into a tree with this Python's pip, which knows this computer's package index."""
    foreign = ["--no-compile", *_foreign(python)] if _foreign(python) else []
    target = tree / SITE.format(python=python)
    options = ["--quiet", "--no-warn-script-location", "--target", str(target), *foreign]
    run(sys.executable, "-m", "pip", "install", *options, *words)


def _foreign(python: str) -> list[str]:
    """Return pip's options for a machine whose Python has another version."""
    ours = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return ["--only-binary=:all:", "--python-version", python.removeprefix("python")] if python != ours else []


def wheels(cache: Cache, python: str) -> Path:
    """Return the layer with a wheel of each required package: an index that works without a network."""
    requirements = _requirements()

    def make(place: Path) -> None:
        tree = place / "tree"
        words = ["--quiet", "--dest", str(tree / WHEELS), *_foreign(python)]
        run(sys.executable, "-m", "pip", "download", *words, *requirements)
        pack(tree, place / "image", "-all-root")
        shutil.rmtree(tree)

    return cache.get("wheels", [python, *requirements, HERE / "layers.py"], make)


def project(cache: Cache, python: str) -> Path:
    """Return the layer with the project's wheel, installed and as a file."""

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
    """Raise `Unable` if this process is not root or tools are missing and cannot be installed."""
    if os.getuid() != 0:
        raise Unable(f"root is required once to {purpose}, later any user may run the tests; hint: sudo make test-vm")
    have(tools, purpose)
