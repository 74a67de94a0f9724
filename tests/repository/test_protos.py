"""The protos are linted and compared with the last release, without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto
from tools import protos

PUBLIC, INTERNAL = "cotenant/v1/node_service.proto", "cotenant/agent/v1/agent_service.proto"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(protos.ROOT / "protos", tmp_path / "protos")
    shutil.copy(protos.ROOT / protos.CONFIG, tmp_path)
    return tmp_path


def edit(tree: Path, file: str, before: str, after: str) -> None:
    path = tree / "protos" / file
    text = path.read_text()
    assert before in text, f"{file} has changed; adapt this test"
    path.write_text(text.replace(before, after, 1))


def changed(tree: Path) -> str:
    with protos.workspace(tree) as now, protos.workspace() as before:
        done = protos.breaking(now, before)
    assert bool(done.returncode) == bool(done.stdout)
    return done.stdout


def test_our_protos_have_no_lint() -> None:
    with protos.workspace() as folder:
        done = protos.lint(folder)
    assert done.returncode == 0, done.stdout


def test_a_field_without_a_comment_is_found(tree: Path) -> None:
    edit(tree, PUBLIC, "  // The node's id.\n", "")
    with protos.workspace(tree) as folder:
        done = protos.lint(folder)
    assert done.returncode
    assert "should have a non-empty comment" in done.stdout


def test_the_same_protos_have_no_breaking_change(tree: Path) -> None:
    assert changed(tree) == ""


def test_a_renamed_field_breaks_callers_of_the_public_package_only(tree: Path) -> None:
    edit(tree, PUBLIC, "string state_reason =", "string why =")
    assert "state_reason" in changed(tree)
    edit(tree, PUBLIC, "string why =", "string state_reason =")
    edit(tree, INTERNAL, "string node_id =", "string node_name =")
    assert changed(tree) == ""


@pytest.mark.deep
def test_a_changed_type_breaks_every_package(tree: Path) -> None:
    edit(tree, INTERNAL, "string node_id =", "int64 node_id =")
    assert "node_id" in changed(tree)


def test_the_descriptors_have_comments_and_all_imports() -> None:
    found = {file.name: file for file in protos.descriptors().file}
    assert "google/api/http.proto" in found
    assert any("nodes" in place.leading_comments for place in found[PUBLIC].source_code_info.location)


def gaps(kind: DescriptorProto | EnumDescriptorProto, first: int) -> set[int]:
    """Return the numbers up to the last one that are neither in use nor reserved."""
    is_message = isinstance(kind, DescriptorProto)
    used = {one.number for one in (kind.field if isinstance(kind, DescriptorProto) else kind.value)}
    for reserved in kind.reserved_range:
        used |= set(range(reserved.start, reserved.end + (not is_message)))  # only that of a message excludes its end
    return set(range(first, max(used, default=0) + 1)) - used


def test_numbers_have_no_gaps_and_removed_ones_are_reserved() -> None:
    found: dict[str, set[int]] = {}

    def look(kind: DescriptorProto, path: str) -> None:
        found[path] = gaps(kind, 1)
        for inner in kind.nested_type:
            look(inner, f"{path}.{inner.name}")
        for enum in kind.enum_type:
            found[f"{path}.{enum.name}"] = gaps(enum, 0)

    for file in protos.descriptors().file:
        if file.package.startswith("cotenant."):
            for message in file.message_type:
                look(message, f"{file.package}.{message.name}")
            for enum in file.enum_type:
                found[f"{file.package}.{enum.name}"] = gaps(enum, 0)
    assert len(found) > 200
    assert {path: missing for path, missing in found.items() if missing} == {}


def test_a_gap_is_found() -> None:
    kind = DescriptorProto(field=[FieldDescriptorProto(number=1), FieldDescriptorProto(number=4)])
    assert gaps(kind, 1) == {2, 3}
    kind.reserved_range.add(start=2, end=3)
    assert gaps(kind, 1) == {3}
