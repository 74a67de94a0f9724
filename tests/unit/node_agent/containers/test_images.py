"""Images of OCI layouts: unpacked into the cache as they were built, once, or refused with the reason."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.images import Entry, layer_of, write_layout

from cotenant.core.model.lifecycle import LaunchCause
from cotenant.node_agent.containers.container_config import Image
from cotenant.node_agent.containers.images import ImageStore
from cotenant.node_agent.containers.layers import Unpacker
from cotenant.node_agent.containers.oci_layout import BadImage
from cotenant.node_agent.runtime.launch import CannotLaunch, launch_step

BASE = [
    Entry("etc"),
    Entry("etc/a", b"a"),
    Entry("etc/b", b"b", mode=0o4755),
    Entry("usr/lib/x.so", b"x"),
    Entry("lib", link="usr/lib"),
]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "images", 1 << 20, list)
    made.open()
    return made


def unpacked(store: ImageStore, text: str, user: Mapping[str, object] | None = None) -> Image:
    async def prepare() -> Image | None:
        return await store.prepare(text, user, asyncio.Event(), lambda done, total: None)

    image = asyncio.run(prepare())
    assert image is not None
    return image


def files_of(image: Image) -> dict[str, str]:
    root = Path(image.root)
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def refusal(store: ImageStore, text: str, user: Mapping[str, object] | None = None) -> str:
    with pytest.raises(BadImage) as caught:
        unpacked(store, text, user)
    assert not [path for path in store.directory.iterdir() if path.name.startswith(".new")]
    return str(caught.value)


def test_layers_are_unpacked_one_over_the_other(store: ImageStore, tmp_path: Path) -> None:
    upper = [
        Entry("etc/.wh.a", b""),
        Entry("lib/y.so", b"y"),  # through a link of the lower layer
        Entry("z", link="etc/b", hard=True),
        Entry("opaque/new", b"new"),
    ]
    config = {"Env": ["PATH=/bin", "X=1=2"], "Entrypoint": ["/bin/run"], "Cmd": ["-v"]}
    layout = write_layout(tmp_path / "layout", [layer_of(BASE), layer_of(upper)], config=config)
    image = unpacked(store, f"oci:{layout}:v1")
    assert {"etc/b", "opaque/new", "usr/lib/x.so", "usr/lib/y.so", "z"} <= set(files_of(image))
    assert "etc/a" not in files_of(image)
    root = Path(image.root)
    assert (root / "z").samefile(root / "etc/b")
    assert (root / "etc/b").stat().st_mode & 0o7777 == 0o755  # without set-uid
    assert (root / "etc/b").stat().st_mtime == 1_700_000_000
    assert (image.config.environment, image.config.command) == ({"PATH": "/bin", "X": "1=2"}, ("/bin/run", "-v"))


def test_an_opaque_directory_hides_what_is_below_it_only(store: ImageStore, tmp_path: Path) -> None:
    lower = [Entry("d/old", b""), Entry("d/e/old", b""), Entry("keep", b"")]
    upper = [Entry("d/e/new", b""), Entry("d/new", b""), Entry("d/.wh..wh..opq", b"")]
    layout = write_layout(tmp_path / "layout", [layer_of(lower), layer_of(upper)])
    assert set(files_of(unpacked(store, f"oci:{layout}"))) == {"d/e/new", "d/new", "keep"}


@pytest.mark.parametrize("compression", ["", "gzip", "zstd"])
def test_every_compression_is_read(store: ImageStore, tmp_path: Path, compression: str) -> None:
    if compression == "zstd" and shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    layout = write_layout(tmp_path / "layout", [layer_of(BASE)], compression=compression)
    assert files_of(unpacked(store, f"oci:{layout}"))["etc/a"] == "a"


@pytest.mark.parametrize(
    "hostile",
    [
        [Entry("../out", b"x")],
        [Entry("up", link="../../.."), Entry("up/out", b"x")],
        [Entry("abs", link="/"), Entry("abs/out", b"x")],
        [Entry("stolen", link="../../secret", hard=True)],
        [Entry("s", link="../../../secret"), Entry("stolen", link="s", hard=True)],
        [Entry("up", link=".."), Entry("up/.wh.secret", b"")],
        [Entry(".wh...", b"")],
    ],
)
def test_no_entry_leads_out_of_the_image(store: ImageStore, tmp_path: Path, hostile: list[Entry]) -> None:
    (store.directory / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    layout = write_layout(tmp_path / "layout", [layer_of(hostile)])
    try:
        image = unpacked(store, f"oci:{layout}")
        real = [path for path in Path(image.root).rglob("*") if path.is_file() and not path.is_symlink()]
        assert all(path.read_text() != "secret" for path in real)
    except BadImage:
        pass
    found = {path for path in tmp_path.rglob("out") if store.directory not in path.parents}
    assert not found
    assert (tmp_path / "secret").read_text() == (store.directory / "secret").read_text() == "secret"


def test_an_image_that_cannot_be_used_is_refused_with_the_reason(store: ImageStore, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [layer_of(BASE)])
    assert "the layout has no image 'v2'; it has v1" in refusal(store, f"oci:{layout}:v2")
    assert "index.json cannot be read: No such file or directory" in refusal(store, f"oci:{tmp_path}/none")
    other = write_layout(tmp_path / "other", [layer_of(BASE)], architecture="s390x")
    assert "the image is for linux on s390x, and this node is linux on " in refusal(store, f"oci:{other}")
    write_layout(layout, [layer_of([])], tag="v2")
    assert "name one as oci:DIR:TAG" in refusal(store, f"oci:{layout}")
    big = write_layout(tmp_path / "big", [layer_of([Entry("big", bytes(2 << 20))])])
    assert "it is larger than the cache of images" in refusal(store, f"oci:{big}")


def test_a_disk_that_fills_while_unpacking_is_the_nodes_fault_and_leaves_nothing(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "images"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        store = ImageStore(disk, 1 << 30, list)
        store.open()
        layout = write_layout(tmp_path / "layout", [layer_of([Entry("big", bytes(2 << 20))])])
        with pytest.raises(CannotLaunch, match="No space left on device") as caught, launch_step(LaunchCause.DIRECTORY):
            unpacked(store, f"oci:{layout}")
        assert caught.value.cause == LaunchCause.DISK
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_without_root_directories_that_root_made_read_only_are_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    archive = layer_of([Entry("usr", mode=0o555), Entry("usr/bin", mode=0o555), Entry("usr/bin/x", b"x", mode=0o555)])
    place = tmp_path / "root"
    place.mkdir()
    unpacker = Unpacker(str(place), 1 << 20)
    unpacker.unpack(io.BytesIO(archive))
    unpacker.close()
    assert [(place / name).stat().st_mode & 0o777 for name in ("usr", "usr/bin", "usr/bin/x")] == [0o755, 0o755, 0o555]


@pytest.mark.deep
def test_damage_is_found_before_an_image_is_used(store: ImageStore, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [layer_of(BASE)], compression="")
    for blob in sorted((layout / "blobs/sha256").iterdir()):
        whole = blob.read_bytes()
        blob.write_bytes(whole.replace(b"x.so", b"y.so").replace(b"linux", b"Linux").replace(b"schema", b"Schema"))
        assert "damaged" in refusal(store, f"oci:{layout}:v1")
        blob.write_bytes(whole[:-1])
        assert "damaged" in refusal(store, f"oci:{layout}:v1")
        blob.write_bytes(whole)
    assert unpacked(store, f"oci:{layout}:v1").digest


def test_an_image_is_unpacked_once(store: ImageStore, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [layer_of(BASE)])
    first = unpacked(store, f"oci:{layout}")
    inode = Path(first.root).stat().st_ino
    assert unpacked(store, f"oci:{layout}") == first
    assert Path(first.root).stat().st_ino == inode


@pytest.mark.deep
def test_the_least_recently_used_images_make_room(tmp_path: Path) -> None:
    used: list[str] = []
    store = ImageStore(tmp_path / "images", 2_500, lambda: used)
    store.open()
    layouts = [write_layout(tmp_path / str(n), [layer_of([Entry("f", bytes([n]) * 1000)])]) for n in range(4)]
    images = []
    for number, layout in enumerate(layouts[:3]):
        images.append(unpacked(store, f"oci:{layout}"))
        os.utime(store.directory / images[-1].digest, (number, number))
    assert {path.name for path in store.directory.iterdir()} == {image.digest for image in images[1:]}
    used.append(images[1].digest)
    last = unpacked(store, f"oci:{layouts[3]}")
    assert {path.name for path in store.directory.iterdir()} == {images[1].digest, last.digest}


def test_a_user_without_rights_to_an_image_cannot_use_a_cached_one(store: ImageStore, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    layout = write_layout(tmp_path / "layout", [layer_of(BASE)])
    unpacked(store, f"oci:{layout}")
    layout.chmod(0o700)
    nobody = {"uid": 65534, "gid": 65534, "groups": [65534]}
    assert "index.json cannot be read: Permission denied" in refusal(store, f"oci:{layout}", nobody)
