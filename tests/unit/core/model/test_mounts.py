"""Mounts of a container: how they are written, and what is refused at submission."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec.specs import spec_from_wire, spec_to_wire
from cotenant.core.model.job import Container, JobSpec
from cotenant.core.model.limits import MOUNTS_MAX
from cotenant.core.model.mounts import Mount, mount_errors, parse_mount

PATHS = st.lists(st.text("abc.-_ ", min_size=1).filter(lambda part: part != ".."), min_size=1).map(
    lambda parts: "/" + "/".join(parts)
)


@given(PATHS, PATHS, st.booleans())
def test_a_mount_is_read_as_it_is_written(source: str, target: str, read_only: bool) -> None:
    mount = Mount(source, target, read_only)
    assert parse_mount(str(mount)) == mount


def test_mounts_come_back_from_the_wire() -> None:
    container = Container("dir:/images/root", (Mount("/data", "/mnt", True), Mount("/s", "/s")))
    assert spec_from_wire(spec_to_wire(JobSpec(container=container))).container == container


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "absolute path on the node"),
        ("data:/x", "absolute path on the node"),
        ("/data:x", "must be HOST[:CONTAINER][:ro]"),
        ("/a:/b:/c", "must be HOST[:CONTAINER][:ro]"),
        ("/a:/b:rx", "must be HOST[:CONTAINER][:ro]"),
        ("/a/../b", "without '..'"),
        ("/a:/proc/1", "the container's own"),
        ("/a:/", "the container's own"),
    ],
)
def test_what_is_no_mount_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"must|cannot") as raised:
        parse_mount(text)
    assert said in str(raised.value)


def test_what_contradicts_itself_is_refused_by_field() -> None:
    one = Mount("/a", "/b")
    assert [field for field, _ in mount_errors([one], "")] == ["container.mounts"]
    assert [field for field, _ in mount_errors([one, Mount("/c", "/b/")], "dir:/x")] == ["container.mounts[1].target"]
    many = [Mount("/a", f"/b{number}") for number in range(MOUNTS_MAX + 1)]
    assert [field for field, _ in mount_errors(many, "dir:/x")] == ["container.mounts"]
