"""Files that are read out of a job's working directory, and attempts to read others."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from cotenant.node_agent.runtime import work_files
from cotenant.node_agent.runtime.work_files import NoFiles, read_files
from cotenant.v1.job_pb2 import FILE_KIND_DIRECTORY, FILE_KIND_LINK, FILE_KIND_UNSPECIFIED, FilePart, FileSelection

SECRET = b"secret"
FORBIDDEN_CALL = 100_000  # no system call has this number


@pytest.fixture(params=["openat2", "without openat2"])
def work(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param != "openat2":
        monkeypatch.setattr(work_files, "SYS_OPENAT2", FORBIDDEN_CALL)
    (tmp_path / "secret").write_bytes(SECRET)
    root = tmp_path / "work"
    (root / "out" / "deep").mkdir(parents=True)
    (root / "out" / "a").write_bytes(b"A" * 300_000)
    (root / "out" / "deep" / "b").write_bytes(b"B")
    (root / "empty").mkdir()
    return root


def received(work: Path, path: bytes = b"", **fields: bool) -> list[FilePart]:
    return list(read_files(work, FileSelection(path=path, **fields)))


def contents(parts: list[FilePart]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for part in parts:
        if part.HasField("entry"):
            last = part.entry.path
            found[last] = b""
        found[last] += part.data
    return found


def test_everything_arrives_sorted_by_path(work: Path) -> None:
    found = contents(received(work))
    assert list(found) == [b"", b"empty", b"out", b"out/a", b"out/deep", b"out/deep/b"]
    assert (found[b"out/a"], found[b"out/deep/b"]) == (b"A" * 300_000, b"B")
    assert contents(received(work, b"out/a")) == {b"": b"A" * 300_000}
    assert list(contents(received(work, b"out"))) == [b"", b"a", b"deep", b"deep/b"]


def test_a_list_has_no_content_and_may_be_shallow(work: Path) -> None:
    parts = received(work, list_only=True)
    assert [part.data for part in parts if part.data] == []
    assert {part.entry.path: part.entry.size_bytes for part in parts}[b"out/a"] == 300_000
    assert [part.entry.path for part in received(work, list_only=True, shallow=True)] == [b"", b"empty", b"out"]


@pytest.mark.parametrize(
    "path", [b"../secret", b"out/../../secret", b"up/secret", b"abs", b"abs/passwd", b"proc/root/etc/passwd", b"chain"]
)
def test_nothing_leads_out_of_the_directory(work: Path, path: bytes) -> None:
    (work / "up").symlink_to("..")
    (work / "abs").symlink_to("/etc")
    (work / "proc").symlink_to("/proc/self")
    (work / "chain").symlink_to("up/secret")
    try:
        parts = received(work, path)
    except NoFiles:
        return
    # without openat2 a link is shown as itself
    assert all(part.entry.kind in (FILE_KIND_LINK, FILE_KIND_UNSPECIFIED) and not part.data for part in parts)


def test_an_absolute_path_is_taken_within_the_directory(work: Path, tmp_path: Path) -> None:
    with pytest.raises(NoFiles):
        received(work, bytes(tmp_path / "secret"))
    assert contents(received(work, b"/out/deep/b")) == {b"": b"B"}


def test_links_within_are_followed_when_named_and_kept_when_listed(work: Path, request: pytest.FixtureRequest) -> None:
    (work / "last").symlink_to("out/deep")
    listed = {part.entry.path: part.entry for part in received(work, list_only=True)}
    assert (listed[b"last"].kind, listed[b"last"].link_target) == (FILE_KIND_LINK, b"out/deep")
    assert b"last/b" not in listed
    if work_files.SYS_OPENAT2 != FORBIDDEN_CALL:
        assert contents(received(work, b"last")) == {b"": b"", b"b": b"B"}


def test_pipes_are_named_and_not_opened(work: Path) -> None:
    os.mkfifo(work / "pipe")
    listed = {part.entry.path: part.entry.kind for part in received(work) if part.HasField("entry")}
    assert listed[b"pipe"] == FILE_KIND_UNSPECIFIED
    assert [part.problem for part in received(work, b"pipe")][1:] == ["is neither a file nor a directory"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_a_hard_link_to_a_file_of_another_user_is_left_out(work: Path, tmp_path: Path) -> None:
    os.chown(work, 4711, 4711)
    (tmp_path / "secret").chmod(0o600)
    os.link(tmp_path / "secret", work / "mine")
    parts = received(work, b"mine")
    assert [part.problem for part in parts][1:] == ["belongs to another user"]
    assert all(SECRET not in part.data for part in parts)


def test_a_file_that_is_replaced_while_it_is_read_is_not_followed(work: Path, tmp_path: Path) -> None:
    parts = read_files(work, FileSelection())
    for part in parts:
        if part.entry.path == b"out/a":
            break
    (work / "out" / "a").unlink()
    (work / "out" / "a").symlink_to(tmp_path / "secret")
    rest = list(parts)
    assert rest[0].problem
    assert all(SECRET not in part.data for part in rest)


def test_a_file_that_becomes_shorter_says_so(work: Path) -> None:
    parts = read_files(work, FileSelection(path=b"out/a"))
    assert next(parts).entry.size_bytes == 300_000
    os.truncate(work / "out" / "a", 10)
    assert [(part.data, part.problem) for part in parts] == [
        (b"A" * 10, ""),
        (b"", "became shorter while it was read"),
    ]


def test_an_attempt_without_a_directory_has_no_files(tmp_path: Path) -> None:
    with pytest.raises(NoFiles, match="no files"):
        received(tmp_path / "gone")
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(NoFiles, match="no files"):
        received(tmp_path / "link")


def test_directories_stay_the_kind_that_they_are(work: Path) -> None:
    kinds = {part.entry.path: part.entry.kind for part in received(work, list_only=True)}
    assert kinds[b"empty"] == FILE_KIND_DIRECTORY
    assert ctypes.sizeof(work_files._OpenHow) == 24  # the first version of the kernel's structure
