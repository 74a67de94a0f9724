"""Folders on their way from a client to a job: what arrives, what is sent, what is refused."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.support.properties import examples
from tests.unit.folders.trees import (
    Direct,
    Tree,
    assignment_of,
    build,
    content_of,
    read,
    store,
    trees,
    upload,
    write,
)

from cotenant.cli.jobs import folder_scan
from cotenant.cli.jobs.folder_digests import digests_of, read_chunk
from cotenant.cli.jobs.folder_scan import scan
from cotenant.cli.jobs.folder_upload import prepare
from cotenant.cli.outcome import CommandError
from cotenant.codec.errors import Problem
from cotenant.folders.chunk_files import ChunkFiles
from cotenant.folders.content import FILE, BadFolder, digest_of, pages_of
from cotenant.node_agent.runtime.uploaded_folder import CannotFetch, UploadedFolders
from cotenant.services.queue.folders.folder_store import ChunksMissing, FolderRules, FolderStore
from cotenant.v1.folder_service_pb2 import FolderEntry


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(
        root,
        {b"a": ("file", 0o644, b"one"), b"b": ("file", 0o755, b"x" * (2**20 + 1)), b"d": ("directory", 0o755, b"")},
    )
    return root


def paths(root: Path) -> set[bytes]:
    return {entry.path for entry in scan(str(root)).entries}


@given(tree=trees())
@settings(max_examples=examples(20))
def test_a_folder_arrives_bit_for_bit(tree: Tree) -> None:
    with tempfile.TemporaryDirectory() as place:
        root, folders = Path(place, "root"), store(Path(place, "store"))
        write(root, tree)
        expected = read(root)
        record, _ = upload(root, folders)
        build(UploadedFolders(Path(place), Direct(folders, record), 2**30), record, Path(place, "work"))
        assert read(Path(place, "work")) == expected == tree


def test_a_second_upload_sends_nothing_and_a_change_only_its_chunk(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store")
    first, sent = upload(project, folders)
    assert sent == 4  # three chunks and a page
    assert upload(project, folders) == (first, 0)
    (project / "a").write_text("two")
    second, sent = upload(project, folders)
    assert (sent, second.id != first.id) == (2, True)


def test_an_upload_that_was_cut_goes_on_where_it_was(project: Path, tmp_path: Path) -> None:
    folders, prepared = store(tmp_path / "store"), prepare(str(project))
    own = folders.of("lab")
    missing = own.missing(list(prepared.sources))
    own.write([content_of(prepared, missing[0])])
    with pytest.raises(ChunksMissing):
        own.commit(prepared.pages)
    assert own.missing(list(prepared.sources)) == missing[1:]
    assert upload(project, folders)[1] == len(missing) - 1


def test_a_crash_leaves_no_half_chunk(project: Path, tmp_path: Path) -> None:
    record, _ = upload(project, store(tmp_path / "store"))
    left = tmp_path / "store" / "lab" / "chunks" / "tmp" / "0badc0de"
    left.write_bytes(b"half")
    folders = store(tmp_path / "store")  # the queue starts again
    assert folders.of("lab").missing(record.page_digests) == []
    assert not left.exists()


def test_chunks_of_a_request_are_written_before_the_first_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, flushed = ChunkFiles(tmp_path / "chunks", durable=True), list[int]()
    chunks.open()
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(len(list((tmp_path / "chunks/tmp").iterdir()))))
    assert chunks.write_all([b"one", b"two!", b"one"]) == 7
    assert flushed == [2, 2]
    assert not list((tmp_path / "chunks/tmp").iterdir())
    assert chunks.write_all([b"two!", b"three"]) == 5
    assert sorted(chunk.size_bytes for chunk in chunks.all()) == [3, 4, 5]


def test_a_tenant_has_a_quota(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store", quota_bytes=2**20)
    with pytest.raises(Problem) as refused:
        upload(project, folders)
    assert (refused.value.reason, refused.value.code.name) == ("UPLOAD_QUOTA", "RESOURCE_EXHAUSTED")
    assert ".cotenantignore" in refused.value.metadata["remedy"]
    own = folders.of("lab")
    own.write([b"small"])
    own.write([b"small"])  # counts once
    assert own.free_bytes == 2**20 - len(b"small")
    assert store(tmp_path / "store", quota_bytes=2**20).of("lab").free_bytes == own.free_bytes


def test_a_tenant_cannot_learn_what_another_has(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store")
    record, sent = upload(project, folders, "red")
    assert folders.of("blue").find(record.id) is None
    assert upload(project, folders, "blue")[1] == sent


def test_folders_that_no_job_needs_are_removed_after_a_while(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store", kept_seconds=1000)
    first, _ = upload(project, folders)
    (project / "a").write_text("two")
    second, _ = upload(project, folders)
    own, now = folders.of("lab"), time.time()
    before = own.free_bytes
    assert folders.collect({("lab", first.id)}, now + 900) == 0
    assert folders.collect({("lab", first.id), ("other", second.id)}, now + 100_000) > 0
    assert own.find(second.id) is None
    assert own.find(first.id) == first
    assert own.free_bytes > before
    assert own.missing(own.commit(first.page_digests).page_digests) == []
    assert upload(project, folders)[1] == 2  # the changed file, and the list


def test_two_stores_on_one_directory_see_the_same(project: Path, tmp_path: Path) -> None:
    """Replicas of the queue share a directory."""
    one, other = store(tmp_path / "store"), store(tmp_path / "store")
    assert other.of("lab").free_bytes
    record, _ = upload(project, one)
    assert other.of("lab").find(record.id) == record
    build(UploadedFolders(tmp_path, Direct(other, record), 2**30), record, tmp_path / "work")
    assert read(tmp_path / "work") == read(project)


def test_a_folder_with_a_lost_chunk_is_repaired_by_the_next_upload(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store")
    record, _ = upload(project, folders)
    chunk = digest_of(b"one").hex()
    (tmp_path / "store" / "lab" / "chunks" / chunk[:2] / chunk).write_bytes(b"0ne")
    own = folders.of("lab")
    with pytest.raises(ChunksMissing):
        own.read(digest_of(b"one"))
    own.forget(record.id)
    with pytest.raises(ChunksMissing):
        own.commit(record.page_digests)
    assert upload(project, folders) == (record, 1)


@pytest.mark.parametrize(
    "path", [b"../a", b"/etc/passwd", b"a/../../b", b"", b".", b"a//b", b"a\0b", b"a/", b"x" * 256]
)
def test_no_path_leads_out_of_a_folder(path: bytes, tmp_path: Path) -> None:
    own = store(tmp_path / "store").of("lab")
    [page] = pages_of([FolderEntry(path=path, kind=FILE, mode=0o644)])
    own.write([page])
    with pytest.raises(BadFolder):
        own.commit([digest_of(page)])


def test_no_entry_is_below_a_link(tmp_path: Path) -> None:
    own = store(tmp_path / "store").of("lab")
    entries = [FolderEntry(path=b"l", kind=3, link_target=b"d"), FolderEntry(path=b"l/x", kind=FILE)]  # type: ignore[arg-type]  # an enum's number
    [page] = pages_of(entries)
    own.write([page])
    with pytest.raises(BadFolder, match="parent"):
        own.commit([digest_of(page)])


def test_ignore_files_are_respected_with_gits_rules(tmp_path: Path) -> None:
    root = tmp_path / "r"
    for name in ("keep.txt", "a.log", "important.log", ".git/config", "build/x", "sub/b.log", "sub/build/y", "data/z"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("*.log\n/build/\n!important.log\n")
    (root / "sub" / ".gitignore").write_text("!b.log\n")
    (root / ".cotenantignore").write_text("# comment\ndata\nimportant.log\n")
    assert paths(root) == {
        b".gitignore", b".cotenantignore", b"keep.txt", b"sub", b"sub/.gitignore", b"sub/b.log", b"sub/build",
        b"sub/build/y",
    }  # fmt: skip
    (root / ".cotenantignore").write_text("!.git\n")
    assert b".git/config" in paths(root)


@pytest.mark.parametrize(
    ("line", "why"), [("[a-@]", "bad character range a-@"), ("*a" * 9, "has more than 8 asterisks between two slashes")]
)
def test_a_pattern_that_cannot_be_used_is_named_with_its_line(project: Path, line: str, why: str) -> None:
    (project / ".gitignore").write_text(f"# * * * * * * * * * *\n{line}\n")
    with pytest.raises(CommandError) as refused:
        paths(project)
    assert f".gitignore:2: {line}: {why}" in str(refused.value)


def test_many_asterisks_in_a_row_are_one(project: Path) -> None:
    """Each would be a place at which a name may be divided: with 25 of them, in more ways than can be tried."""
    (project / ("n" * 200)).mkdir()
    (project / ".gitignore").write_text("*" * 25 + "/\n")
    assert {path for path in paths(project) if b"/" not in path and (project / path.decode()).is_dir()} == set()


def test_links_that_lead_out_are_an_error_and_loops_are_not(project: Path) -> None:
    (project / "loop").symlink_to(".")
    (project / "d" / "up").symlink_to("../a")
    assert {b"loop", b"d/up"} <= paths(project)
    (project / "d" / "out").symlink_to("../../secret")
    (project / "abs").symlink_to("/etc/passwd")
    with pytest.raises(CommandError, match="2 of its entries lead out") as refused:
        scan(str(project))
    assert refused.value.details == ("abs -> /etc/passwd", "d/out -> ../../secret")


def test_sockets_and_pipes_are_left_out(project: Path) -> None:
    os.mkfifo(project / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(project / "s"))
        found = scan(str(project))
    assert found.skipped == ["pipe", "s"]
    assert {entry.path for entry in found.entries} == {b"a", b"b", b"d"}


def test_a_folder_over_the_limit_names_its_largest_entries(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        (project / f"n{number:02}").write_bytes(b"x" * number)
    monkeypatch.setattr(folder_scan, "FOLDER_BYTES_MAX", 2**20)
    with pytest.raises(CommandError, match="at most 1") as refused:
        scan(str(project))
    assert len(refused.value.details) == 11
    assert refused.value.details[1].endswith("  b")
    assert ".cotenantignore" in refused.value.hint
    monkeypatch.setattr(folder_scan, "FOLDER_BYTES_MAX", 2**30)
    monkeypatch.setattr(folder_scan, "ENTRIES_MAX", 3)
    with pytest.raises(CommandError, match="15 entries"):
        scan(str(project))


def test_a_file_that_changes_between_reading_and_sending_is_an_error(project: Path) -> None:
    found = scan(str(project))
    digests = digests_of(found, None, lambda done, total: None)
    (project / "a").write_text("two")
    with pytest.raises(CommandError, match="a changes while it is read"):
        read_chunk(found.root, b"a", 0, 3, digests[0][0])
    (project / "a").write_text("longer")
    with pytest.raises(CommandError, match="a changes while it is read"):
        digests_of(found, None, lambda done, total: None)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, opened = scan(str(project)), os.open

    def refuse(path: str | bytes, flags: int, *more: int) -> int:
        if os.fsencode(path).endswith(b"/a"):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)  # root can read everything
    with pytest.raises(CommandError, match="--upload: a cannot be read: permission denied"):
        digests_of(found, None, lambda done, total: None)


def test_two_uploads_of_one_folder_at_once_are_one(tmp_path: Path) -> None:
    own = FolderStore(FolderRules(tmp_path / "store")).of("lab")
    chunks, barrier = [bytes([number]) * 1000 for number in range(20)], threading.Barrier(4)

    def send() -> None:
        barrier.wait()
        for place in range(0, len(chunks), 5):
            own.write(chunks[place : place + 5])

    with ThreadPoolExecutor(4) as senders:
        for sent in [senders.submit(send) for _ in range(4)]:
            sent.result()
    assert own.missing(map(digest_of, chunks)) == []
    assert own.free_bytes == FolderRules().quota_bytes - 20_000


def test_unchanged_files_are_not_read_again(project: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = time.time() - 100
    for name in ("a", "b"):
        os.utime(project / name, (old, old))
    monkeypatch.setattr("cotenant.cli.jobs.folder_digests.RACY_SECONDS", -100.0)  # as if it had been changed long ago
    first, shown = prepare(str(project)), list[int]()
    found = scan(str(project))
    [memory] = (home / "cotenant").iterdir()
    assert digests_of(found, memory, lambda done, total: shown.append(done))[0] == (digest_of(b"one"),)
    assert shown == []
    memory.write_text('{"format": 1, "files": {"a": [1, 2]}}')
    assert prepare(str(project)).pages == first.pages


def test_a_node_fetches_only_what_its_cache_lacks(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store")
    record, _ = upload(project, folders)
    source = Direct(folders, record)
    cache = UploadedFolders(tmp_path, source, 2**21)
    build(cache, record, tmp_path / "one")
    assert source.sent == 4
    build(cache, record, tmp_path / "two")
    assert source.sent == 5  # the list only
    (tmp_path / "one" / "a").write_text("a job writes")
    assert (tmp_path / "two" / "a").read_text() == "one"
    assert cache.shrink() == 0
    assert UploadedFolders(tmp_path, source, 2**20).shrink() >= 3


def test_the_cache_keeps_what_is_being_built(project: Path, tmp_path: Path) -> None:
    import asyncio

    folders = store(tmp_path / "store")
    record, _ = upload(project, folders)
    cache = UploadedFolders(tmp_path, Direct(folders, record), 0)
    fetched = asyncio.run(cache.fetch(assignment_of(record), asyncio.Event(), lambda done, total: None))
    assert cache.shrink() == 0
    cache.release(fetched)
    assert cache.shrink() > 2**20


def test_a_node_refuses_another_folder_and_other_chunks(project: Path, tmp_path: Path) -> None:
    folders = store(tmp_path / "store")
    first, _ = upload(project, folders)
    (project / "a").write_text("two")
    second, _ = upload(project, folders)
    with pytest.raises(CannotFetch, match="another folder"):
        build(UploadedFolders(tmp_path, Direct(folders, second), 2**30), first, tmp_path / "work")
