"""Build hook: compiles protos/ into packages of cotenant for wheels and development installs, and ships the protos."""

from __future__ import annotations

import ast
import gzip
import re
import shutil
import sysconfig
import zlib
from binascii import b2a_base64
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GENERATED = ("v1", "agent", "internal", "storage")  # below src/cotenant; git ignores them
FIRST_IMPORT, PURE_PYTHON = "from google.protobuf import descriptor as", "if not _descriptor._USE_C_DESCRIPTORS:"
ADDED = "_descriptor_pool.Default().AddSerializedFile("
EXPERIMENTAL = " # This class is part of an EXPERIMENTAL API."
PAGES = "src/cotenant/web/static"
PLAIN_PAGES = ("tables.js",)
SHIPPED = "protos"  # likewise: the public protos and what they import, for clients in other languages
FOREIGN = (  # protos of googleapis-common-protos: those that ours import, and the details of errors
    *("google/api/annotations.proto", "google/api/field_behavior.proto", "google/api/http.proto"),
    *("google/rpc/error_details.proto", "google/rpc/status.proto"),
)


def plugin(name: str) -> str:
    """Return the path of a protoc plug-in in the build environment, even if it is not on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise RuntimeError(
            f"protoc plug-in {name} not found; it is part of mypy-protobuf, a requirement of [build-system]"
        )
    return found


def google_protos() -> Path:
    """Return the folder with google/api/*.proto, the annotations that our protos import."""
    found = find_spec("google.api.annotations_pb2")
    if not found or not found.origin:
        raise RuntimeError(
            "google/api not found; it is part of googleapis-common-protos, a requirement of [build-system]"
        )
    return Path(found.origin).parents[2]


def compile_protos(root: Path) -> None:
    """Generate typed stubs into src/ for every file under protos/, in a Python package per package of protos."""
    from grpc_tools import protoc

    for package in GENERATED:
        shutil.rmtree(root / "src" / "cotenant" / package, ignore_errors=True)
    protos = sorted((root / "protos").rglob("*.proto"))
    packages = {path.parent.relative_to(root / "protos") for path in protos}
    if unknown := {package.parts[1] for package in packages} - set(GENERATED):
        raise RuntimeError(f"protos/cotenant has packages that are not in GENERATED: {', '.join(sorted(unknown))}")
    command = [
        "protoc",
        f"--proto_path={root / 'protos'}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--proto_path={google_protos()}",
        f"--plugin=protoc-gen-mypy={plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={plugin('protoc-gen-mypy_grpc')}",
        *(f"--{kind}_out={root / 'src'}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *map(str, protos),
    ]
    if protoc.main(command) != 0:
        raise RuntimeError("protoc rejected a file under protos/; see its message above")
    for path in protos:
        keep_services(root / "src" / path.relative_to(root / "protos").with_name(f"{path.stem}_pb2_grpc.py"))
    for path in (root / "src" / "cotenant").glob("*/**/*_pb2.pyi"):
        path.write_text(shortened(path.read_text()))
    for path in (root / "src" / "cotenant").glob("*/**/*_pb2.py"):
        path.write_text(packed(path.read_text()))
    for package in sorted({*packages, *(package.parent for package in packages)} - {Path("cotenant")}):
        text = f'"""Generated from protos/{package} at build time; do not edit."""\n'
        (root / "src" / package / "__init__.py").write_text(text)


def keep_services(path: Path) -> None:
    """Remove what nobody uses of a module for gRPC: all of it without services, else gRPC's experimental classes."""
    first, *services = path.read_text().split("\nclass ")
    if not services:
        path.unlink()
        path.with_suffix(".pyi").unlink(missing_ok=True)
        return
    kept = [first]
    for before, service in zip([first, *services], services, strict=False):
        if not before.endswith(EXPERIMENTAL):
            kept.append(service)
    path.write_text("\nclass ".join(kept).replace(EXPERIMENTAL, "").rstrip() + "\n")


def packed(module: str) -> str:
    """Return a module of messages with its descriptor compressed: most of the module, and of its compiled form.

    What only protobuf in pure Python sets once more, options and offsets in the descriptor, is left out.
    """
    begin = module.index(ADDED) + len(ADDED)
    end = module.index("')\n", begin) + 1
    text = b2a_base64(zlib.compress(ast.literal_eval(module[begin:end]), 9), newline=False).decode()
    imports = f"import zlib as _zlib\nfrom binascii import a2b_base64 as _a2b_base64\n{FIRST_IMPORT}"
    head = module[:begin].replace(FIRST_IMPORT, imports, 1)
    rest = module[end:].partition(PURE_PYTHON)[0]
    return f"{head}_zlib.decompress(_a2b_base64('{text}')){rest}"


def shortened(types: str) -> str:
    """Return the types of a module of messages without what says nothing.

    That is: notes for linters, names as bytes, numbers of fields, and what a message only repeats of its base.
    """
    types = re.sub(r"^ +(_ClearFieldArgType: .*|def ClearField\(.*)\n", "", types, flags=re.MULTILINE)
    types = re.sub(r', b"\w+"', "", re.sub("  # no[q]a: Y015", "", types))
    for line in (r"\w+_FIELD_NUMBER: _builtins.int", r"def WhichOneof\(self, oneof_group: _Never\) -> None: ..."):
        types = re.sub(rf"^ +{line}\n", "", types, flags=re.MULTILINE)
    return re.sub(r"^ +DESCRIPTOR: _descriptor.Descriptor\n\n", "", types, flags=re.MULTILINE)


def ship_protos(root: Path) -> None:
    """Copy the public protos into the package, with what they import and their descriptors with comments."""
    from grpc_tools import protoc

    shipped = root / "src" / "cotenant" / SHIPPED
    shutil.rmtree(shipped, ignore_errors=True)
    shutil.copytree(root / "protos" / "cotenant" / "v1", shipped / "cotenant" / "v1")
    for name in FOREIGN:
        (shipped / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(google_protos() / name, shipped / name)
    command = [
        "protoc",
        f"--proto_path={shipped}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--descriptor_set_out={shipped / 'descriptors.binpb'}",
        "--include_imports",
        "--include_source_info",
        *map(str, sorted(shipped.rglob("*.proto"))),
    ]
    if protoc.main(command) != 0:
        raise RuntimeError("protoc rejected a public file under protos/; see its message above")
    pack(shipped / "descriptors.binpb")


def pack(path: Path) -> None:
    """Compress descriptors, without those places in the sources that have no comment: they are most of the file."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    found = FileDescriptorSet.FromString(path.read_bytes())
    for file in found.file:
        places = [
            place for place in file.source_code_info.location if place.leading_comments or place.trailing_comments
        ]
        del file.source_code_info.location[:]
        file.source_code_info.location.extend(places)
    packed = gzip.compress(found.SerializeToString(deterministic=True), mtime=0)
    path.with_suffix(".binpb.gz").write_bytes(packed)
    path.unlink()


def pack_pages(root: Path, folder: Path) -> dict[str, str]:
    """Compress the scripts and styles of the dashboard, which serves them so; return the place of each in the wheel.

    The wheel leaves out the plain ones (see pyproject.toml), apart from that which reports read too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places = {}
    for path in sorted((root / PAGES).glob("*.*s")):
        if path.name not in PLAIN_PAGES:
            packed = folder / f"{path.name}.gz"
            packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
            places[str(packed)] = f"cotenant/web/static/{packed.name}"
    return places


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling's own generic, unused here
    """Hatch hook that runs before the files of the wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the stubs; they are part of the wheel although git ignores them."""
        compile_protos(Path(self.root))
        ship_protos(Path(self.root))
        if self.target_name == "wheel" and version != "editable":
            folder = Path(self.root) / "build" / "pages"
            build_data["force_include"].update(pack_pages(Path(self.root), folder))
